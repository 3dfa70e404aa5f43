# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Distillation for a Runner."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Optional

import torch.nn as nn
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner, find_latest_checkpoint
from torch import Tensor

from ...errors import CheckpointError, UsageError, in_context
from ...gates import Gate, records_of
from ...runtime import SafeCheckpointHook, one_batch, unwrap
from ...runtime.checkpoints.companions import find_companion, read_companion
from ...runtime.checkpoints.work_dir_paths import run_folders
from ..budget.hook import BudgetHook
from ..gate_loss_hook import GateLossHook
from .distillation import START, Distillation, check_options

DENSE_PHASE = 'dense_phase'
_KEY, _TEACHER = 'distillation', 'teacher'


@HOOKS.register_module()
class DistillationHook(GateLossHook):
    """Adds ``loss_distill``: how far the network is from a dense one, see :class:`Distillation`.

    The teacher is saved beside each checkpoint that can be resumed, as ``epoch_3.teacher.pth``
    beside ``epoch_3.pth``, so a resumed run has the same one. It brings
    :class:`SafeCheckpointHook` along.

    With ``task=0`` the rest of the model is left out of training: neither heads nor the task's
    losses run, no annotation is read, and the weights of the heads stay as they are.

    Args:
        teacher (str): ``'start'``, the dense network that the run starts from (``load_from``,
            ``init_cfg``), where that was trained for the task; ``'dense_phase'``, for a run
            that starts from ImageNet's weights: all gates are open for the first part of the
            training, and what the network is then is the teacher of the rest; or the file of a
            checkpoint. Defaults to 'start'.
        weight, outputs, kl, temperature: See :class:`Distillation`.
        task (float): What the task's own losses are multiplied with. Defaults to 1.0.
        dense_phase (float): Part of the training that gates are open for with
            ``teacher='dense_phase'``. Defaults to 0.4.
        logits (str): Name of the module that gives logits, for ``kl``. Defaults to 'head'.
        backbone (str): Name of the model's part that is compared, '' for all of it.
            Defaults to 'backbone'.
        log_interval (int): Iterations between two logs of every gate's
            openness. Defaults to 50.

    Example:
        >>> custom_hooks = [
        ...     dict(type='BudgetHook', target=0.5), dict(type='DistillationHook', task=0)]
    """

    loss_name = 'loss_distill'

    def __init__(
        self,
        teacher: str = START,
        weight: float = 10.0,
        task: float = 1.0,
        outputs: Sequence[str] = (),
        kl: float = 0.0,
        temperature: float = 1.0,
        dense_phase: float = 0.4,
        logits: str = 'head',
        backbone: str = 'backbone',
        log_interval: int = 50,
    ) -> None:
        super().__init__(log_interval)
        with in_context('DistillationHook'):
            check_options(weight, kl, temperature, task)
            if not 0 < dense_phase < 1:
                raise UsageError(f'dense_phase={dense_phase!r} must be within (0, 1)')
        self.teacher = teacher
        self.task = task
        self.dense_phase = dense_phase
        self.backbone = backbone
        self.options: dict[str, Any] = dict(
            weight=weight, outputs=outputs, kl=kl, temperature=temperature, logits=logits,
            backbone=backbone,
        )  # fmt: skip
        self.distillation: Optional[Distillation] = None
        self._own_losses: set[str] = set()
        self._before: Optional[Callable] = None
        self._loaded: Any = None
        self._path: Optional[str] = None

    def before_run(self, runner: Runner) -> None:
        SafeCheckpointHook.of(runner)

    def before_train(self, runner: Runner) -> None:
        """Make the teacher, or take over that of a resumed run."""
        with in_context('DistillationHook'):
            self._check(runner)
        super().before_train(runner)
        self._own_losses = {h.loss_name for h in runner.hooks if isinstance(h, GateLossHook)}
        loaded, self._loaded = self._loaded, None
        with in_context('DistillationHook'):
            state = self._saved(runner, loaded) if runner.iter else None
            if state is not None:
                # A file of weights must still be the one; the network itself is trained by now.
                there = os.path.isfile(self.teacher)
                self._learn_from(runner, self.teacher if there else START)
                assert self.distillation is not None
                if there and self.distillation.token != state['token']:
                    raise CheckpointError(
                        f'teacher={self.teacher!r} is not the teacher that this training was begun '
                        'with; name that one, or start anew without --resume'
                    )
                self.distillation.load_state_dict(state)
            elif self.teacher != DENSE_PHASE:
                self._learn_from(runner, self.teacher)
            else:
                self._open_gates(1.0)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """End the dense phase when it is time."""
        if self.distillation is None and runner.iter >= self._phase(runner):
            self._open_gates(None)
            self._learn_from(runner, START)
            runner.logger.info(
                'DistillationHook: the dense phase is over; the network, as it is, teaches the rest'
            )

    def loss(self, gates: dict[str, Gate], data_samples: Any, runner: Runner) -> Tensor:
        if self.distillation is None:
            return next(iter(records_of(gates).values())).probs.new_zeros(())
        with in_context('DistillationHook'):
            return self.distillation.loss()

    def discard(self) -> None:
        super().discard()
        if self.distillation is not None:
            self.distillation.discard()

    def after_train(self, runner: Runner) -> None:
        """Leave the model as it was."""
        super().after_train(runner)
        if self.distillation is None:
            self._open_gates(None)
            return
        self.distillation.close()
        model = unwrap(runner.model)
        if self.task == 0:
            model.__dict__.pop('forward', None)
            if self._before is not None:
                model.__dict__['forward'] = self._before

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Write the teacher beside it. Called on the main process only."""
        path = token = None
        # Without an optimizer it is one of the best, and not meant to be resumed.
        if self.distillation is not None and 'optimizer' in checkpoint:
            state = self.distillation.state_dict()
            token = state.pop('token')
            path = SafeCheckpointHook.of(runner).add_companion(_TEACHER, token, state)
        checkpoint[_KEY] = dict(teacher=self._kind(), file=path, token=token)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Also called for load_from and testing: whether it is of use shows later.
        self._loaded = checkpoint.get(_KEY)
        self._path = runner._load_from
        if self._path is None and runner._resume:
            self._path = find_latest_checkpoint(runner.work_dir)

    def _check(self, runner: Runner) -> None:
        """Refuse what would fail later, or teach the wrong thing."""
        for hook in runner.hooks:
            if isinstance(hook, DistillationHook) and hook is not self:
                raise UsageError('custom_hooks have two of them; keep one')
            if self.teacher != DENSE_PHASE or not isinstance(hook, BudgetHook):
                continue
            if hook.begin < self.dense_phase:
                raise UsageError(
                    f'gates are open until dense_phase={self.dense_phase:g} of the training, and '
                    f'BudgetHook closes them from begin={hook.begin:g} on; set '
                    f'begin={self.dense_phase:g} there, and reach beyond it'
                )
        finds = getattr(runner.model, 'find_unused_parameters', True)
        if self.task == 0 and is_model_wrapper(runner.model) and not finds:
            raise UsageError(
                'with task=0 the heads do not run, which several processes have to be told: set '
                'find_unused_parameters=True in the config (in model_wrapper_cfg if it has one)'
            )

    def _kind(self) -> str:
        return self.teacher if self.teacher in (START, DENSE_PHASE) else 'file'

    def _phase(self, runner: Runner) -> float:
        return self.dense_phase * runner.max_iters

    def _open_gates(self, forced: Optional[float]) -> None:
        for gate in self._gates.values():
            gate.forced = forced

    def _learn_from(self, runner: Runner, teacher: str) -> None:
        model = unwrap(runner.model)
        self.distillation = Distillation(model, teacher, **self.options)
        if self.task == 0:
            self._before = model.__dict__.get('forward')
            part = None if self.options['kl'] else self.backbone
            model.__dict__['forward'] = MethodType(_without_task(part), model)

    def _saved(self, runner: Runner, loaded: Any) -> Optional[dict[str, Any]]:
        """The teacher of the run that is resumed; None if its dense phase is not over."""
        if not isinstance(loaded, dict):
            raise CheckpointError(
                'the checkpoint to be resumed was saved without DistillationHook, so its teacher '
                'is not known; go on from its weights alone, by load_from without --resume'
            )
        if loaded.get('teacher') != self._kind():
            raise CheckpointError(
                f'teacher={self.teacher!r}, and the training to be resumed was begun with '
                f'{loaded.get("teacher")!r}; set that, or start anew without --resume'
            )
        if not isinstance(loaded.get('file'), str):
            if self.teacher == DENSE_PHASE and runner.iter <= self._phase(runner):
                return None
            raise CheckpointError(
                'the checkpoint to be resumed was saved without its teacher (best checkpoints and '
                'those without an optimizer have none); resume one that has'
            )
        folders = run_folders(runner)
        path = find_companion(_TEACHER, loaded['file'], loaded['token'], self._path, folders)
        if path is None:
            raise CheckpointError(
                f'the teacher of the checkpoint to be resumed, {os.path.basename(loaded["file"])}, '
                'is neither beside it nor in the work dir; copy the file there'
            )
        state = read_companion(path)
        if state['token'] != loaded['token']:
            raise CheckpointError(
                f'{path} belongs to another checkpoint than the one to be resumed'
            )
        runner.logger.info(f'DistillationHook: teacher resumed from {path}')
        return state

    def _after_forward(self, runner: Runner, args: tuple, kwargs: dict, losses: Any) -> Any:
        losses = super()._after_forward(runner, args, kwargs, losses)
        if losses is None or self.distillation is None:
            return losses
        return {
            name: _times(self.task, value)
            if 'loss' in name and name not in self._own_losses
            else value
            for name, value in losses.items()
        }


def _times(factor: float, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_times(factor, item) for item in value]
    return value * factor


def _without_task(part: Optional[str]) -> Callable:
    """``forward`` of a model that computes no loss of its own, but runs what is compared: one part,
    or all that gives its raw outputs."""

    # Called so, a method of the model is found again when it is unpickled.
    def forward(
        self: nn.Module, inputs: Any, data_samples: Any = None, mode: str = 'tensor', **more: Any
    ) -> Any:
        if mode != 'loss' or not self.training:
            return type(self).forward(self, inputs, data_samples, mode=mode, **more)
        if part is None:
            type(self).forward(self, inputs, data_samples, mode='tensor', **more)
        else:
            self.get_submodule(part)(one_batch(inputs))
        return {}

    return forward
