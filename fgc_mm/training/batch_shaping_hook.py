# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Batch shaping: every channel conditional, neither always on nor always off."""

from __future__ import annotations

from collections import deque
from typing import Any, Optional

import torch
from mmengine.dist import all_gather, get_rank, get_world_size
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from ..coupling import gather_rows
from ..errors import UsageError
from ..gates import Gate, records_of
from ..runtime import unwrap
from .beta import beta_cdf
from .gate_loss_hook import GateLossHook
from .schedules import ScheduleCfg, build_schedule

_KEY = 'batch_shaping'


@HOOKS.register_module()
class BatchShapingHook(GateLossHook):
    """Adds ``loss_batch_shaping`` of "Batch-shaping for learning conditional
    channel gated networks" (Bejnordi et al.), weighted with zeta.

    The probabilities of each channel over the batch are drawn toward a
    Beta(a, b) distribution, see :func:`batch_shaping`.

    A small batch tells little about a distribution. ``gather`` and ``history``
    let the probabilities of other ranks and of earlier batches join the sort,
    as constants; the loss stays the mean over this batch's own images, so its
    gradient is on average that of one large batch. The history starts empty; a
    resumed training takes it over, unless each of several ranks has its own.

    Args:
        zeta (float | dict): Weight of the loss, a number or a schedule in
            epochs. Defaults to falling linearly from 0.75 to 0 over the first
            100 epochs.
        a (float): First shape parameter of the prior. Defaults to 0.6.
        b (float): Second shape parameter of the prior. Defaults to 0.4.
        gather (str, optional): ``'ranks'`` sorts over all processes.
            Defaults to None.
        history (int): Number of earlier batches that join the sort.
            Defaults to 0.
        log_interval (int): Iterations between two logs of every gate's
            openness. Defaults to 50.
    """

    loss_name = 'loss_batch_shaping'

    def __init__(
        self,
        zeta: ScheduleCfg = dict(start=0, end=100, begin=0.75, value=0.0),
        a: float = 0.6,
        b: float = 0.4,
        gather: Optional[str] = None,
        history: int = 0,
        log_interval: int = 50,
    ) -> None:
        super().__init__(log_interval)
        if not (a > 0 and b > 0):
            raise UsageError(f'BatchShapingHook: a={a} and b={b} must both be positive')
        if gather not in (None, 'ranks'):
            raise UsageError(f"BatchShapingHook: gather={gather!r} must be 'ranks' or None")
        if history < 0:
            raise UsageError(f'BatchShapingHook: history={history!r} must be 0 or more')
        self.zeta = build_schedule(zeta, 'BatchShapingHook: zeta')
        self._zeta = self.zeta
        self.a = a
        self.b = b
        self.gather = gather
        self._history: deque[Tensor] = deque(maxlen=history)
        self._current: list[Tensor] = []
        self._loaded: Optional[list[Tensor]] = None

    def before_train(self, runner: Runner) -> None:
        super().before_train(runner)
        self._zeta = self.zeta.settled(runner, 'BatchShapingHook: zeta')
        loaded, self._loaded = self._loaded, None
        if runner.iter and loaded is not None:
            device = next(unwrap(runner.model).parameters()).device
            self._history.extend(rows.to(device) for rows in loaded)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Of ranks that do not share theirs, only the first one's could be saved.
        if self._history and (get_world_size() == 1 or self.gather == 'ranks'):
            checkpoint[_KEY] = [rows.cpu() for rows in self._history]

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Also called for load_from and testing: whether it is of use shows later.
        self._loaded = checkpoint.get(_KEY)

    def loss(self, gates: dict[str, Gate], data_samples: Any, runner: Runner) -> Tensor:
        zeta = self._zeta.now(runner)
        records = records_of(gates)
        if zeta == 0:
            return next(iter(records.values())).probs.new_zeros(())
        once = [r.probs for name, r in records.items() if gates[name].once_per_picture]
        others = [r.probs for name, r in records.items() if not gates[name].once_per_picture]
        parts = [self._shaped(torch.cat(once, dim=1))] if once else []
        # Levels and regions are many, and their number may change from batch to batch.
        parts += [batch_shaping(probs, self.a, self.b) for probs in others]
        return zeta * torch.stack(parts).sum()

    def _shaped(self, probs: Tensor) -> Tensor:
        """The loss of gates that decide once for each picture, beside each other."""
        current, before = probs.detach(), 0
        if self.gather == 'ranks':
            counts = [int(count) for count in all_gather(torch.tensor([len(probs)]))]
            current, before = gather_rows(current, counts), sum(counts[: get_rank()])
        if self._history and self._history[-1].size(1) != current.size(1):
            self._history.clear()  # resumed with other gates
        joint = torch.cat([*self._history, current])
        self._current.append(current)
        start = len(joint) - len(current) + before
        return batch_shaping(probs, self.a, self.b, joint, start)

    def after_step(self, runner: Runner) -> None:
        """Let the batch join the history."""
        self._history.extend(self._current)
        self._current.clear()

    def discard(self) -> None:
        super().discard()
        self._current.clear()


def batch_shaping(
    probs: Tensor,
    a: float = 0.6,
    b: float = 0.4,
    joint: Optional[Tensor] = None,
    start: int = 0,
) -> Tensor:
    """Squared distance between the prior and the empirical distribution.

    Per channel the n probabilities are sorted, and the CDF of Beta(a, b) at the
    i-th of them is compared with the empirical CDF ``i / (n + 1)``; the squared
    difference is averaged over the batch and summed over the channels.

    Args:
        probs (Tensor): B x C probabilities of one or more layers.
        a (float): First shape parameter of the prior. Defaults to 0.6.
        b (float): Second shape parameter of the prior. Defaults to 0.4.
        joint (Tensor, optional): n x C, all that is sorted: these probabilities
            and others, which do not join the mean. Defaults to None, only
            these.
        start (int): Row of ``joint`` at which these begin. Defaults to 0.

    Returns:
        Tensor: A scalar, differentiable in ``probs``.
    """
    joint = probs.detach() if joint is None else joint
    empirical = _places(joint)[start : start + len(probs)].to(probs) / (len(joint) + 1)
    return (beta_cdf(probs, a, b) - empirical).square().mean(dim=0).sum()


def _places(values: Tensor) -> Tensor:
    """The place of each value in its sorted column, counted from 1."""
    order = values.t().contiguous().argsort(dim=1, stable=True)
    numbers = torch.arange(1, len(values) + 1, device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, numbers).t()
