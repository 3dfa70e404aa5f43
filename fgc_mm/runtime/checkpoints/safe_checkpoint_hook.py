# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Checkpoints that survive a kill at any moment, and a full disk."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
from mmengine.dist import is_main_process
from mmengine.fileio import FileClient, LocalBackend, get_file_backend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner, find_latest_checkpoint

from ...errors import CheckpointError
from ...files import discard, partial_path, remove_partials, replacing
from ..module_hooks import Attachments
from .companions import companion_path, companions_of
from .epoch_length import EpochLength, epoch_length
from .random_state_hook import RandomStateHook

_KEY = 'safe_checkpoint'
_LAST = 'last_checkpoint'
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@HOOKS.register_module()
class SafeCheckpointHook(Hook):
    """Makes the checkpoints of any ``CheckpointHook`` safe, and resuming exact.

    mmengine's hook deletes the old checkpoint, then writes the new one where it
    will be. With this hook beside it a new checkpoint is written under the name
    ``epoch_3.pth.partial``, brought to the disk and renamed;
    then ``last_checkpoint`` is replaced in the same way; only then outdated
    checkpoints are removed, with the files that belong to them (:meth:`add_companion`).
    Whenever the process is killed, the file ``last_checkpoint`` names is whole. What a
    killed training leaves behind is removed by the next one in the same folder. A write
    that fails, on a full disk say, leaves everything as it was and raises a
    :class:`~fgc_mm.errors.CheckpointError`.

    A checkpoint is saved before the validation that is due at the same time, and
    mmengine does not validate after resuming it: the metrics would be missing, and
    whatever learns from them (best checkpoints, ``BudgetHook``, early stopping).
    A resumed training therefore begins with that validation. If its epochs have
    another length than before, as with another number of ranks, iterations and
    schedules are translated (:class:`~fgc_mm.runtime.checkpoints.epoch_length.EpochLength`).

    The hook brings :class:`RandomStateHook` along. ``tools/train.py`` adds it to every
    training, hooks with companions bring it along (:meth:`of`); elsewhere it is an entry of
    ``custom_hooks``. Checkpoints on other storage, and those of a ``FlexibleRunner``, are written
    as mmengine does it, but old ones are removed after new ones there as well.
    """

    # After CheckpointHook has set itself up, and after all that is resumed.
    priority = 'LOWEST'

    def __init__(self) -> None:
        self._target: Optional[str] = None
        self._stage: Callable[[str], str] = partial_path
        self._tokens: dict[str, tuple[str, str]] = {}
        self._outdated: dict[str, Callable[[str], None]] = {}
        self._attached = Attachments()
        self._loaded: Optional[dict[str, Any]] = None
        self._newest: Optional[str] = None
        self._validating = False
        self._work_dir = ''
        self._epoch_length = EpochLength()

    @staticmethod
    def of(runner: Runner) -> SafeCheckpointHook:
        """The one of a runner, which gets one if it has none."""
        if not any(isinstance(hook, SafeCheckpointHook) for hook in runner.hooks):
            runner.register_hook(SafeCheckpointHook())
        return next(hook for hook in runner.hooks if isinstance(hook, SafeCheckpointHook))

    def add_companion(self, name: str, token: str, content: dict[str, Any]) -> Optional[str]:
        """Write a file that belongs to the checkpoint being saved and lies beside it.

        To be called in ``before_save_checkpoint``. Checkpoint and companions get their names
        together and are removed together. What is there already, under the same token, is not
        written again.

        Args:
            name (str): What it is called.
            token (str): What the checkpoint knows it by, unique for this content.
            content (dict): Tensors, numbers and strings. Tensors are written as they lie,
                without a copy.

        Returns:
            str: Its path, on a local disk; None if this hook does not look after the checkpoint.
        """
        if self._target is None:
            return None
        path = companion_path(self._target, name)
        if self._tokens.get(name) != (path, token) or not os.path.isfile(path):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            with open(self._stage(path), 'wb') as file:
                torch.save({**content, 'token': token}, file)
            self._tokens[name] = path, token
        return path

    def before_run(self, runner: Runner) -> None:
        if not any(isinstance(hook, RandomStateHook) for hook in runner.hooks):
            runner.register_hook(RandomStateHook())
        self._epoch_length.keep(runner)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Also called for load_from and testing: whether it is of use shows later.
        self._loaded = checkpoint.get(_KEY)

    def before_train(self, runner: Runner) -> None:
        """Clean up, stand beside the hooks that save, catch up on a validation."""
        self._attached.remove()
        hooks = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
        loaded, self._loaded = self._loaded, None
        self._newest = _resumed_from(runner) if runner.iter else None
        self._work_dir = str(runner.work_dir)
        if is_main_process():
            self._clean_up(runner, hooks, loaded or {})
        for hook in hooks:
            backend = _Postponing(hook.file_backend, self._outdated)
            self._attached.replace(hook, 'file_backend', backend)
            self._attached.wrap(hook, '_save_checkpoint_with_step', self._save_step)
            self._attached.wrap(hook, '_save_best_checkpoint', self._save_best)
        self._attached.wrap(runner, 'save_checkpoint', partial(self._save, runner))
        if runner.iter and loaded is not None:
            self._epoch_length.adapt(runner, loaded['epoch_length'])
            if not loaded['validated'] and _validation_due(runner):
                runner.logger.info('The validation due at the resumed checkpoint comes first')
                runner.val_loop.run()

    def after_train(self, runner: Runner) -> None:
        self._attached.remove()

    def before_val(self, runner: Runner) -> None:
        self._validating = True

    def after_val(self, runner: Runner) -> None:
        self._validating = False

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        checkpoint[_KEY] = dict(
            outdated=[os.path.basename(path) for path in self._outdated],
            validated=self._validating,
            epoch_length=epoch_length(runner),
        )

    def _clean_up(self, runner: Runner, hooks: list[CheckpointHook], loaded: dict) -> None:
        """Remove what a killed training was writing, or had still to remove."""
        folders = {self._work_dir, *(str(hook.out_dir) for hook in hooks)}
        folders = {os.path.abspath(folder) for folder in folders if '://' not in folder}
        left = [path for folder in sorted(folders) for path in remove_partials(folder)]
        folder = os.path.dirname(os.path.abspath(self._newest or ''))
        # A checkpoint taken to another folder has nothing to remove there.
        for name in loaded.get('outdated', []) if self._newest and folder in folders else []:
            path = os.path.join(folder, os.path.basename(name))
            if not path.endswith('.pth'):  # whatever the checkpoint says
                continue
            for file in (*companions_of(path), path):
                if os.path.isfile(file):
                    discard(file)
                    left.append(file)
        if left:
            names = ', '.join(os.path.basename(path) for path in left)
            runner.logger.info(f'Removed what an interrupted training has left: {names}')

    def _save(
        self,
        runner: Runner,
        original: Callable,
        out_dir: str,
        filename: str,
        file_client_args: Optional[dict] = None,
        **kwargs: Any,
    ) -> None:
        """``runner.save_checkpoint``, as a whole or not at all."""
        if not is_main_process():
            original(out_dir, filename, file_client_args, **kwargs)
            return
        local = isinstance(runner, Runner) and _is_local(
            out_dir, file_client_args, kwargs.get('backend_args')
        )
        # What belongs to a checkpoint lies on a local disk, wherever that goes.
        folder = runner.work_dir if '://' in str(out_dir) else out_dir
        target, known = os.path.join(folder, filename), dict(self._tokens)
        try:
            # The checkpoint first: with its name it is valid, and whoever resumes it
            # finds what belongs to it under either name.
            with replacing() as stage:
                self._target, self._stage = target, stage
                if local:
                    stage(target)
                name = partial_path(filename) if local else filename
                original(out_dir, name, file_client_args, **kwargs)
        except BaseException as error:
            self._tokens = known
            reason = _reason(error)
            if reason is not None and isinstance(error, Exception):
                raise self._failed(target, reason) from error
            raise
        finally:
            self._target = None
        path = os.path.join(out_dir, filename)
        self._outdated.pop(path, None)
        if kwargs.get('save_optimizer', True):
            self._newest = path

    def _save_step(self, original: Callable, runner: Runner, step: int, meta: dict) -> None:
        """``_save_checkpoint_with_step``, which writes ``last_checkpoint`` where it is."""
        if not is_main_process() or not isinstance(runner, Runner):
            original(runner, step, meta)
            self._remove_outdated()
            return
        last = os.path.join(runner.work_dir, _LAST)
        folder = partial_path(os.path.join(runner.work_dir, 'new_' + _LAST))
        # The same runner, but for the folder it names.
        elsewhere = copy.copy(runner)
        elsewhere._work_dir = folder
        try:
            os.makedirs(folder, exist_ok=True)
            original(elsewhere, step, meta)
            with replacing() as stage:
                os.replace(os.path.join(folder, _LAST), stage(last))
        except OSError as error:
            raise self._failed(last, error) from error
        finally:
            discard(folder)
        self._remove_outdated()

    def _save_best(self, original: Callable, runner: Runner, metrics: dict) -> None:
        original(runner, metrics)
        self._remove_outdated()

    def _remove_outdated(self) -> None:
        while self._outdated:
            path = next(iter(self._outdated))
            remote = '://' in path
            beside = os.path.join(self._work_dir, os.path.basename(path)) if remote else path
            for companion in companions_of(beside):
                discard(companion)
            self._outdated.pop(path)(path)

    def _failed(self, path: str, error: OSError) -> CheckpointError:
        if self._newest is not None:
            kept = f'The last whole checkpoint, {self._newest}, is untouched'
        else:
            kept = 'There is no earlier checkpoint of this training'
        advice = 'See to it that it can be written'
        if error.errno in DISK_FULL:
            advice = 'Make room (default_hooks.checkpoint.max_keep_ckpts=1 keeps the latest only)'
        return CheckpointError(
            f'{path} could not be saved: {error.strerror or error}. {kept}. {advice}, then go on '
            'with --resume'
        )


class _Postponing:
    """A file backend whose removals are made later."""

    def __init__(self, backend: Any, outdated: dict[str, Callable[[str], None]]) -> None:
        self.backend = backend
        self.outdated = outdated

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.backend, name)
        if name in ('remove', 'rmtree'):
            return lambda path: self.outdated.update({str(path): method})
        return method


def _reason(error: Optional[BaseException]) -> Optional[OSError]:
    """What the system said; ``torch.save`` hides it behind an error of its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _is_local(out_dir: str, client: Optional[dict], backend: Optional[dict]) -> bool:
    if client is not None:  # mmengine's older way to name a backend
        return isinstance(FileClient.infer_client(client, out_dir).client, LocalBackend)
    return isinstance(get_file_backend(out_dir, backend_args=backend), LocalBackend)


def _resumed_from(runner: Runner) -> Optional[str]:
    """The file a training goes on from."""
    if runner._load_from is not None:
        return str(runner._load_from)
    return find_latest_checkpoint(runner.work_dir)


def _validation_due(runner: Runner) -> bool:
    """Whether the loop validates right after the checkpoint that was resumed."""
    loop = runner.train_loop
    if isinstance(loop, EpochBasedTrainLoop):
        if loop.iter != loop.epoch * len(loop.dataloader):  # in the middle of an epoch
            return False
        done, end = loop.epoch, loop.max_epochs
    elif isinstance(loop, IterBasedTrainLoop):
        done, end = loop.iter, loop.max_iters
    else:
        return False
    if runner.val_loop is None or done < loop.val_begin:
        return False
    loop._decide_current_val_interval()
    return done % loop.val_interval == 0 or done == end
