# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The sparsity loss."""

from __future__ import annotations

from typing import Any, Optional

import torch
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from ..errors import UsageError
from ..gates import Gate, records_of
from ..macs import BackboneShare
from ..runtime import unwrap
from .gate_loss_hook import GateLossHook
from .schedules import ScheduleCfg, build_schedule


@HOOKS.register_module()
class L0Hook(GateLossHook):
    """Adds ``loss_l0 = rho * L_0``, the expected share of open channels.

    Args:
        rho (float | dict): Weight of the loss, a number or a schedule in
            epochs, ``dict(start=..., end=..., value=...)``: 0 until ``start``,
            from there linearly to ``value`` at ``end``. Defaults to 0.4.
        cost (str): ``'channels'``: the mean probability over all channels of
            all layers and the batch. ``'macs'``: every channel weighted with
            the MACs it turns off while the others are open, at the image size
            of the batch, so that all open is 1 as well.
            Defaults to 'channels'.
        log_interval (int): Iterations between two logs of every gate's
            openness. Defaults to 50.

    Example:
        >>> custom_hooks = [dict(type='L0Hook', rho=dict(start=0, end=200, value=0.4))]
    """

    loss_name = 'loss_l0'

    def __init__(
        self, rho: ScheduleCfg = 0.4, cost: str = 'channels', log_interval: int = 50
    ) -> None:
        super().__init__(log_interval)
        if cost not in ('channels', 'macs'):
            raise UsageError(f"L0Hook: cost={cost!r} must be 'channels' or 'macs'")
        self.rho = build_schedule(rho, 'L0Hook: rho')
        self._rho = self.rho
        self.cost = cost
        self._costs: Optional[BackboneShare] = None

    def before_train(self, runner: Runner) -> None:
        super().before_train(runner)
        self._rho = self.rho.settled(runner, 'L0Hook: rho')
        if self.cost == 'macs':
            self._costs = BackboneShare(unwrap(runner.model), '')
            self._costs.attach()

    def after_train(self, runner: Runner) -> None:
        super().after_train(runner)
        if self._costs is not None:
            self._costs.detach()

    def loss(self, gates: dict[str, Gate], data_samples: Any, runner: Runner) -> Tensor:
        costs = self._costs.per_channel() if self._costs is not None else None
        probs = {name: record.probs for name, record in records_of(gates).items()}
        return self._rho.now(runner) * l0(probs, costs)


def l0(probs: dict[str, Tensor], costs: Optional[dict[str, float]] = None) -> Tensor:
    """Weighted mean of the probabilities of being open.

    Args:
        probs (dict[str, Tensor]): Gate -> decisions x C probabilities.
        costs (dict[str, float], optional): Gate -> weight of each of its
            channels. Defaults to None, all alike.

    Returns:
        Tensor: A scalar, 1 if every channel is open for sure.
    """
    weights = [1.0 if costs is None else costs[name] for name in probs]
    total = sum(w * p.size(1) for w, p in zip(weights, probs.values(), strict=True))
    # Levels and regions are no more than pictures: gates count by their channels.
    weighted = [
        w / total * p.mean(dim=0).sum() for w, p in zip(weights, probs.values(), strict=True)
    ]
    return torch.stack(weighted).sum()
