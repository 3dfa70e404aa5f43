# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Feature boosting and suppression, another way to choose channels."""

from __future__ import annotations

import math
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor

from ..errors import UsageError
from .base import Gate, OptDict
from .record import GateRecord


@MODELS.register_module()
class FBSGate(Gate):
    """Gate of "Dynamic Channel Pruning: Feature Boosting and Suppression"
    (Gao et al., arXiv 1810.05331).

    The saliency ``g = ReLU(fc(mean |x|))`` predicts the importance of every
    channel. The ``ceil(density * channels)`` most salient ones are kept and
    multiplied by their saliency, the others are suppressed. Training and
    evaluation decide alike, but for ``training_density``.

    In the record, ``logits`` are the saliencies before the selection, ``mask``
    marks the channels that are not zero (a kept one whose saliency is zero is
    closed), and ``probs`` equals ``mask``: the decision is not a random one. A
    loss on ``probs`` therefore has no gradient here; the density is given.

    Deviations from the paper: the gate reads the input of the block, as all
    gates do, where the paper's reads the input of the convolution; batch norm
    keeps its scale, which the paper leaves to the saliency, so that pretrained
    networks fit; saliency comes after the activation instead of before it,
    which is the same because it is not negative; the small L1 loss on the
    saliencies is not part of the gate. The density falls step by step, as in the
    paper, with :class:`~fgc_mm.training.DensityHook`.

    Args:
        in_channels (int): Channels of the block input.
        channels (int): Channels of the gated feature.
        density (float): Share of channels that is kept. Defaults to 0.5.
        bias_init (float): Initial bias of ``fc``; with 1 the network starts
            unboosted. Defaults to 1.0.
        weight_scale (float): Factor of the initial weight of ``fc``; below 1 a
            pretrained network is boosted less at first. Defaults to 1.0.
        init_cfg (dict, optional): Initialization config. Defaults to None.

    Attributes:
        training_density (float, optional): In place of ``density`` while it is
            trained, for a hook that lowers it step by step. None at first.

    Example:
        >>> gate = FBSGate(64, 128, density=0.25)
        >>> int((gate(torch.rand(1, 64, 8, 8)) > 0).sum())
        32
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        density: float = 0.5,
        bias_init: float = 1.0,
        weight_scale: float = 1.0,
        init_cfg: OptDict = None,
    ) -> None:
        super().__init__(in_channels, channels, init_cfg)
        if not 0 < density <= 1:
            raise UsageError(f'FBSGate: density={density} must be within (0, 1]')
        self.density = density
        self.training_density: Optional[float] = None
        if not weight_scale > 0:
            raise UsageError(f'FBSGate: weight_scale={weight_scale} must be positive')
        self.bias_init = bias_init
        self.weight_scale = weight_scale
        self.fc = nn.Linear(in_channels, channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Kaiming times ``weight_scale`` for the weight, ``bias_init`` for the bias."""
        nn.init.kaiming_normal_(self.fc.weight, nonlinearity='relu')
        with torch.no_grad():
            self.fc.weight.mul_(self.weight_scale)
        nn.init.constant_(self.fc.bias, self.bias_init)

    def pool(self, x: Tensor) -> Tensor:
        """Mean absolute value of the block input."""
        return super().pool(x.abs())

    def decide(self, pooled: Tensor) -> tuple[Tensor, GateRecord]:
        saliency = F.relu(self.fc(pooled))
        density = self.density
        if self.training and self.training_density is not None:
            density = self.training_density
        kept = saliency.topk(math.ceil(density * self.channels), dim=1).indices
        multiplier = saliency * torch.zeros_like(saliency).scatter_(1, kept, 1.0)
        mask = (multiplier > 0).to(multiplier.dtype)
        return multiplier, GateRecord(saliency, mask, mask)
