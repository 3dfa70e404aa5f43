# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What all hooks that add a loss on gates have in common."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
import torch.nn as nn
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor

from ..errors import UsageError
from ..gates import Gate, find_gates, forget_records, records_of
from ..runtime import Attachments, forward_argument, unwrap

TASK_LOSS = 'loss_task'
"""What a model's own ``loss``, as that of mmpretrain's classifiers, is called beside losses on
gates."""


class GateLossHook(Hook):
    """Adds one named loss on the gates to the losses of any task model.

    While the model trains, a forward hook on it adds the entry ``loss_name`` to
    the losses ``forward(..., mode='loss')`` returns; ``parse_losses`` sums it
    up and logs it like the model's own. Nothing of the model is subclassed, and
    several such hooks work side by side. An entry of the model that is called
    ``loss`` becomes ``loss_task``: ``loss`` is the sum in the log of every task.

    A subclass sets ``loss_name`` and implements :meth:`loss`. What it keeps of a batch it changes
    in :meth:`after_step` and forgets in :meth:`discard`. If it overrides
    ``before_train``, ``after_train`` or :meth:`discard`, it calls these.

    The first of these hooks also logs the share of open channels: its mean as
    ``gate/openness`` with the losses, every gate's as ``gate/openness/<gate>``
    to the message hub and the visualizer's backends (TensorBoard, ...).

    Args:
        log_interval (int): Iterations between two logs of every gate's
            openness. Defaults to 50.
    """

    loss_name = 'loss_gate'

    def __init__(self, log_interval: int = 50) -> None:
        if log_interval < 1:
            raise UsageError(f'{type(self).__name__}: log_interval={log_interval} must be > 0')
        self.log_interval = log_interval
        self._gates: dict[str, Gate] = {}
        self._attached = Attachments()
        self._openness: dict[str, Tensor] = {}
        self._logs = False

    @abstractmethod
    def loss(self, gates: dict[str, Gate], data_samples: Any, runner: Runner) -> Tensor:
        """The loss of one batch, already weighted.

        Called outside autocast, right after the model's forward.

        Args:
            gates (dict[str, Gate]): Name -> gate, each with the record of this
                pass.
            data_samples (list): The data samples of the batch, as given to the
                model.
            runner (Runner): The runner.

        Returns:
            Tensor: A scalar.
        """

    def after_step(self, runner: Runner) -> None:
        """The optimizer has taken the step of the last batch."""

    def before_train(self, runner: Runner) -> None:
        """Find the gates and put the forward hook on the task model."""
        # Not earlier: EMAHook copies the model in before_run.
        model = unwrap(runner.model)
        self._gates = find_gates(model)
        if not self._gates:
            backbone = type(getattr(model, 'backbone', model)).__name__
            raise UsageError(
                f'{type(self).__name__}: the model {type(model).__name__} (backbone {backbone}) '
                "has no gates; give it a gated backbone, such as backbone=dict(type='GatedResNet'"
                f', ...), or take {type(self).__name__} out of custom_hooks'
            )
        self._logs = next(h for h in runner.hooks if isinstance(h, GateLossHook)) is self
        self._attached.remove()
        self._attached.before(model, not_compiled(self._before_forward))

        def after_forward(model: nn.Module, args: tuple, kwargs: dict, losses: Any) -> Any:
            return self._after_forward(runner, args, kwargs, losses)

        self._attached.after(model, not_compiled(after_forward), with_kwargs=True)

    def values_of_step(self) -> Iterator[tuple[str, Tensor]]:
        """Logits and features of the gates that ran, for
        :class:`~fgc_mm.runtime.FiniteHook`: banks and budgets are made of them.

        The first of these hooks speaks for all, as their gates are the same.
        """
        for name, gate in self._gates.items() if self._logs else ():
            for record in gate.pass_records:
                yield f'the logits of {name}', record.logits
                if record.feature is not None:
                    yield f'the features of {name}', record.feature

    def discard(self) -> None:
        """Forget the batch whose loss was computed last, because its step is not taken."""
        self._openness = {}

    def after_train(self, runner: Runner) -> None:
        """Take the forward hook off."""
        self._attached.remove()
        self._openness = {}

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Optional[dict] = None,
    ) -> None:
        """Log the openness of this iteration, then :meth:`after_step`."""
        if self._logs and self._openness:
            names = list(self._openness)
            openness = torch.stack(list(self._openness.values())).cpu()
            channels = torch.tensor([self._gates[name].channels for name in names])
            mean = float((openness * channels).sum() / channels.sum())
            runner.message_hub.update_scalar('train/gate/openness', mean)
            if self.every_n_train_iters(runner, self.log_interval):
                by_gate = zip(names, openness.tolist(), strict=True)
                log_by_gate(runner, {f'gate/openness/{name}': value for name, value in by_gate})
        self.after_step(runner)

    def _before_forward(self, *_: Any) -> None:
        forget_records(self._gates)

    def _after_forward(self, runner: Runner, args: tuple, kwargs: dict, losses: Any) -> Any:
        if forward_argument('mode', args, kwargs) != 'loss' or not isinstance(losses, dict):
            return None
        if self.loss_name in losses:
            raise UsageError(
                f'{type(self).__name__}: the losses already have {self.loss_name!r}; list the hook '
                'once in custom_hooks'
            )
        records = records_of(self._gates)
        data_samples = forward_argument('data_samples', args, kwargs)
        device = next(iter(records.values())).probs.device
        with torch.autocast(device.type, enabled=False):
            value = self.loss(self._gates, data_samples, runner)
        if self._logs:
            self._openness = {name: r.mask.float().mean() for name, r in records.items()}
        # `parse_losses` logs the sum as `loss`, where a part of that name would hide it.
        if TASK_LOSS not in losses:
            losses = {TASK_LOSS if n == 'loss' else n: part for n, part in losses.items()}
        return {**losses, self.loss_name: value}


def log_by_gate(runner: Runner, values: dict[str, float]) -> None:
    """Log a number for each gate, without the prefix 'train/': the console line stays short."""
    runner.message_hub.update_scalars(values)
    runner.visualizer.add_scalars(values, step=runner.iter + 1)


def not_compiled(run: Callable) -> Callable:
    """Keep a function out of a model that is compiled, as by ``compile=True``: the losses on gates
    search banks, look at values and change state."""
    # Without it nothing has been compiled, and importing it takes a second.
    if 'torch._dynamo' not in sys.modules:
        return run
    return torch.compiler.disable(run)
