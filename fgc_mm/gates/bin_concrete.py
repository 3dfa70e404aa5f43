# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The gate of Feature-Gate Coupling: a small MLP and a binary concrete sample."""

from __future__ import annotations

import math
from typing import Optional, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmengine.dist import get_world_size
from mmengine.registry import MODELS
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError
from .base import Gate, OptDict
from .record import GateRecord

OPEN_LOGIT = 40.0
"""A logit whose probability is 1 in float32: open with any noise, at any
threshold below 1 (whose logits end at 37), and without a gradient that could move it."""


def logit_of(threshold: float) -> float:
    """The logit above which a channel is open.

    Decisions compare logits with it, in the type of the logits: close to 1
    single precision has far fewer probabilities than logits.

    Args:
        threshold (float): The probability.

    Example:
        >>> logit_of(0.5)
        0.0
    """
    if not 0 < threshold < 1:
        return -math.inf if threshold <= 0 else math.inf
    return math.log(threshold / (1 - threshold))


class _HardSample(torch.autograd.Function):
    """0/1 forward, gradient of the relaxed sample backward (straight through)."""

    @staticmethod
    def forward(ctx, noisy_logits: Tensor, temperature: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(noisy_logits)
        ctx.temperature = temperature
        return (noisy_logits > 0).to(noisy_logits.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (noisy_logits,) = ctx.saved_tensors
        soft = torch.sigmoid(noisy_logits / ctx.temperature)
        return grad * soft * (1 - soft) / ctx.temperature, None


@MODELS.register_module()
class BinConcreteGate(Gate):
    """Gate of "Self-supervised Feature-Gate Coupling for Dynamic Network
    Pruning" (Shi et al.), after batch-shaped channel gating (Bejnordi et al.).

    ``a = fc2(ReLU(norm(fc1(GAP(x)))))``, ``pi = sigmoid(a)``. In training the
    mask is a hard sample ``a + logistic noise > 0`` whose gradient is that of
    the sample relaxed with ``temperature``; in evaluation it is
    ``pi > threshold``.

    Deviation from the paper: the norm is a config value, because batch norm
    over two pooled vectors, as in detection, is +-1 whatever the input.

    Args:
        in_channels (int): Channels of the block input.
        channels (int): Channels of the gated feature.
        hidden (int): Width of the hidden layer. Defaults to 16.
        norm_cfg (dict, optional): Norm between the layers, ``dict(type='BN1d')``,
            ``dict(type='LN')`` or None. Defaults to ``dict(type='BN1d')``.
        temperature (float): Temperature of the relaxation. Defaults to 2/3.
        bias_init (float): Initial bias of ``fc2``; positive starts with a
            nearly dense network (docs/results.md compares values).
            Defaults to 3.0.
        threshold (float): Probability above which a channel is open in
            evaluation. Defaults to 0.5.
        norm_eval (bool): Whether batch norm uses its running statistics in
            training too: for gates that were trained on large batches and are
            fine-tuned on small ones. Defaults to False.
        init_cfg (dict, optional): Initialization config. Defaults to None.

    Example:
        >>> gate = BinConcreteGate(64, 128).eval()
        >>> gate(torch.rand(2, 64, 8, 8)).shape
        torch.Size([2, 128])
    """

    hard = True

    def __init__(
        self,
        in_channels: int,
        channels: int,
        hidden: int = 16,
        norm_cfg: Optional[dict] = dict(type='BN1d'),
        temperature: float = 2 / 3,
        bias_init: float = 3.0,
        threshold: float = 0.5,
        norm_eval: bool = False,
        init_cfg: OptDict = None,
    ) -> None:
        super().__init__(in_channels, channels, init_cfg)
        if hidden < 1:
            raise UsageError(f'BinConcreteGate: hidden={hidden} must be at least 1')
        if temperature <= 0:
            raise UsageError(f'BinConcreteGate: temperature={temperature} must be positive')
        if not 0 < threshold < 1:
            raise UsageError(f'BinConcreteGate: threshold={threshold} must be within (0, 1)')
        self.temperature = temperature
        self.bias_init = bias_init
        self.threshold = threshold
        self.norm_eval = norm_eval
        self.fc1 = nn.Linear(in_channels, hidden, bias=False)
        self.norm = nn.Identity() if norm_cfg is None else build_norm_layer(norm_cfg, hidden)[1]
        self.fc2 = nn.Linear(hidden, channels)
        self.reset_parameters()
        self.train()

    def train(self, mode: bool = True) -> BinConcreteGate:
        """Set the mode; batch norm follows unless ``norm_eval``."""
        super().train(mode)
        if self.norm_eval and isinstance(self.norm, _BatchNorm):
            self.norm.eval()
        return self

    def reset_parameters(self) -> None:
        """Start nearly dense: Kaiming for the layers, ``bias_init`` for the bias."""
        nn.init.kaiming_normal_(self.fc1.weight, nonlinearity='relu')
        nn.init.kaiming_normal_(self.fc2.weight, mode='fan_in', nonlinearity='linear')
        with torch.no_grad():
            self.fc2.weight.mul_(0.1)
            self.fc2.bias.fill_(self.bias_init)

    @torch.no_grad()
    def shift(self, amount: Union[float, Tensor]) -> None:
        """Add to the bias of ``fc2``."""
        self.fc2.bias.add_(amount)

    @torch.no_grad()
    def sharpen(self, factor: float) -> None:
        """Scale ``fc2``."""
        cut = logit_of(self.threshold)
        self.fc2.weight.mul_(factor)
        self.fc2.bias.sub_(cut).mul_(factor).add_(cut)

    def decide(self, pooled: Tensor) -> tuple[Tensor, GateRecord]:
        logits = self.fc2(F.relu(self._normalize(self.fc1(pooled))))
        probs = torch.sigmoid(logits)
        if self.training:
            uniform = torch.rand_like(logits).clamp_(1e-6, 1 - 1e-6)
            multiplier = _HardSample.apply(logits + torch.logit(uniform), self.temperature)
        else:
            multiplier = (logits > logit_of(self.threshold)).to(logits.dtype)
        return multiplier, GateRecord(logits, probs, multiplier.detach())

    def slim_state(self, kept: Tensor, always: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        state = self.state_dict()
        weight, bias = state['fc2.weight'][kept], state['fc2.bias'][kept]
        weight[always], bias[always] = 0.0, OPEN_LOGIT
        reads = state['fc1.weight'][:, inputs]
        return {**state, 'fc1.weight': reads, 'fc2.weight': weight, 'fc2.bias': bias}

    def _normalize(self, hidden: Tensor) -> Tensor:
        norm = self.norm
        alone = hidden.size(0) == 1 and not _spans_ranks(norm)
        if isinstance(norm, _BatchNorm) and norm.training and alone:
            # One image has no batch statistics (the last batch of an odd
            # dataset): normalize with the running ones.
            return F.batch_norm(
                hidden,
                norm.running_mean,
                norm.running_var,
                norm.weight,
                norm.bias,
                training=False,
                eps=norm.eps,
            )
        return norm(hidden)


def _spans_ranks(norm: nn.Module) -> bool:
    """Whether other ranks wait for this one's statistics."""
    return isinstance(norm, nn.SyncBatchNorm) and get_world_size() > 1
