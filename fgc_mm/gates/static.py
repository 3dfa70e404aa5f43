# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A mask that ignores its picture."""

from __future__ import annotations

import torch
from mmengine.registry import MODELS
from torch import Tensor

from .base import Gate, OptDict
from .bin_concrete import OPEN_LOGIT
from .record import GateRecord


@MODELS.register_module()
class StaticGate(Gate):
    """The same channels for every image: static pruning, the control of every dynamic gate.

    It has nothing to learn and costs no MACs. All channels are open until
    :func:`~fgc_mm.pruning.prune` or :class:`~fgc_mm.training.StaticPruningHook` closes some;
    which ones is part of a checkpoint. In the record ``probs`` equals ``mask``, and ``logits``
    are as sure as can be.

    Args:
        in_channels (int): Channels of the block input.
        channels (int): Channels of the gated feature.
        init_cfg (dict, optional): Initialization config. Defaults to None.

    Attributes:
        mask (Tensor): For each channel 1 if it is open, 0 if it is closed.

    Example:
        >>> gate = StaticGate(64, 128)
        >>> gate.mask[:32] = 0
        >>> int(gate(torch.rand(1, 64, 8, 8)).sum())
        96
    """

    hard = True
    mask: Tensor

    def __init__(self, in_channels: int, channels: int, init_cfg: OptDict = None) -> None:
        super().__init__(in_channels, channels, init_cfg)
        self.register_buffer('mask', torch.ones(channels))

    def pool(self, x: Tensor) -> Tensor:
        """Nothing of the input is looked at but its size, which a traced graph keeps open."""
        return x.new_zeros(x.size(0), self.in_channels)

    def decide(self, pooled: Tensor) -> tuple[Tensor, GateRecord]:
        mask = self.mask.to(pooled.dtype).expand(pooled.size(0), -1)
        return mask, GateRecord((2 * mask - 1) * OPEN_LOGIT, mask, mask)

    def slim_state(self, kept: Tensor, always: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        return dict(mask=self.mask[kept])
