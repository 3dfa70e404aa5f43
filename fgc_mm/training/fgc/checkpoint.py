# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What FGCHook has to do with checkpoints."""

from __future__ import annotations

import logging
import os
import uuid
from typing import TYPE_CHECKING, Any, Optional

from mmengine.runner import Runner, find_latest_checkpoint

from ...errors import CheckpointError, in_context
from ...runtime import SafeCheckpointHook
from ...runtime.checkpoints.companions import find_companion, read_companion
from ...runtime.checkpoints.work_dir_paths import run_folders
from ..schedules import epochs_seen

if TYPE_CHECKING:
    from .hook import FGCHook

_KEY, _BANKS = 'fgc', 'banks'


class FGCCheckpoint:
    """Saves and restores the banks and counters of a hook.

    The checkpoint itself gets a small entry: the count of instances, the name of
    the file of banks and a token that is in this file, too. :class:`SafeCheckpointHook`
    sees to it that a checkpoint is never without its banks, and that they are
    removed with it.

    Args:
        hook (FGCHook): The hook.
        save_banks (bool): Whether banks are saved.
        fresh_banks (bool): Whether a resumed run starts with fresh banks.
    """

    def __init__(self, hook: FGCHook, save_banks: bool, fresh_banks: bool) -> None:
        self.hook = hook
        self.save_banks = save_banks
        self.fresh_banks = fresh_banks
        self._loaded: Optional[dict[str, Any]] = None
        self._path: Optional[str] = None
        self._token = (-1, '')

    def after_load(self, runner: Runner, checkpoint: dict) -> None:
        """Keep aside what a checkpoint holds; whether it is of use shows later."""
        entry = checkpoint.get(_KEY)
        self._loaded = dict(entry) if isinstance(entry, dict) else {}
        if not isinstance(self._loaded.get('banks'), str):
            self._loaded['banks'] = None
        self._path = runner._load_from
        if self._path is None and runner._resume:
            self._path = find_latest_checkpoint(runner.work_dir)

    def before_train(self, runner: Runner) -> None:
        """Resume what a checkpoint held."""
        self._token = (-1, '')
        if runner.iter:
            self._resume(runner)
        else:
            self.notice_ignored(runner, 'load_from')
        self._loaded = None

    def notice_ignored(self, runner: Runner, by: str) -> None:
        """Say that banks were not looked at, unless this is a training."""
        loaded, self._loaded = self._loaded, None
        if loaded and loaded.get('banks'):
            runner.logger.info(
                f'FGCHook: {by} takes the weights only; the banks in '
                f'{os.path.basename(loaded["banks"])} are ignored'
            )

    def before_save(self, runner: Runner, checkpoint: dict) -> None:
        """Write the banks and refer to them. Called on the main process only."""
        coupling = self.hook.coupling
        if coupling is None:
            return
        path = None
        # Without an optimizer it is one of the best, and not meant to be resumed.
        if self.save_banks and 'optimizer' in checkpoint:
            if self._token[0] != coupling.seen:
                self._token = coupling.seen, uuid.uuid4().hex
            saver = SafeCheckpointHook.of(runner)
            path = saver.add_companion(_BANKS, self._token[1], coupling.state_dict())
        checkpoint[_KEY] = dict(
            seen=coupling.seen,
            uncoupled=self.hook.uncoupled,
            num_instances=coupling.num_instances,
            banks=path,
            token=None if path is None else self._token[1],
        )

    def _resume(self, runner: Runner) -> None:
        coupling, loaded = self.hook.coupling, self._loaded or {}
        assert coupling is not None
        same_size = loaded.get('num_instances') == coupling.num_instances
        if same_size:
            coupling.seen = loaded['seen']
            self.hook.uncoupled = loaded.get('uncoupled', 0.0)
        else:
            coupling.seen = round(epochs_seen(runner) * coupling.num_instances)
        recorded = loaded.get('banks')
        if self.fresh_banks or (recorded is None and not self.save_banks):
            runner.logger.log(logging.WARNING, 'FGCHook: resuming with fresh banks')
            return
        advice = 'To go on with fresh banks, set fresh_banks=True in FGCHook'
        if recorded is None:
            raise CheckpointError(
                'FGCHook: the checkpoint to be resumed was saved without banks (best checkpoints '
                'and those saved without an optimizer or with save_banks=False have none); resume '
                f'one that has. {advice}'
            )
        path = find_companion(_BANKS, recorded, loaded['token'], self._path, run_folders(runner))
        if path is None:
            raise CheckpointError(
                f'FGCHook: the banks of the checkpoint to be resumed, '
                f'{os.path.basename(recorded)}, are neither beside it nor in the work dir; copy '
                f'the file there. {advice}'
            )
        with in_context('FGCHook', after=f'. {advice}'):
            state = read_companion(path)
            if state['token'] != loaded['token']:
                raise CheckpointError(
                    f'{path} belongs to another checkpoint than the one to be resumed'
                )
            with in_context(path):
                coupling.load_state_dict(state)
        runner.logger.info(f'FGCHook: banks resumed from {path}')
