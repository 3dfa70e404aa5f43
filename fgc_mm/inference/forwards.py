# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What stands in for ``forward`` of layers whose weights were prepared."""

from __future__ import annotations

from types import NoneType
from typing import Optional

import torch
import torch.nn as nn
from mmcv.cnn.bricks.wrappers import Conv2d as MMConv2d
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..macs import GatedConv, gated_convs
from ..nets import GatedBlock
from ..runtime.module_hooks import is_watched
from .convolution import convolve
from .folding import FoldedLayer
from .stamp import checks

# torch 2.1 and 2.2 have it under this name only; compilers know both.
is_compiling = getattr(torch.compiler, 'is_compiling', None) or torch._utils.is_compiling


def recording() -> bool:
    """Whether someone watches the operations: a gradient, a trace, a compiler."""
    return torch.is_grad_enabled() or torch.jit.is_tracing() or is_compiling()


def autocasts() -> bool:
    """Whether autocast is on for the CPU; on a GPU it does not matter here."""
    try:
        return torch.is_autocast_enabled('cpu')
    except TypeError:  # before torch 2.4
        return torch.is_autocast_cpu_enabled()


def is_plain_conv(conv: nn.Module) -> bool:
    """Whether a convolution is nothing but ``F.conv2d`` of its weight."""
    # A subclass may do something to the weight first, such as standardize it; so may
    # pruning and the like, which leave no parameter of that name, or a patch.
    return (
        type(conv) in (nn.Conv2d, MMConv2d)
        and conv.padding_mode == 'zeros'
        and conv._parameters.get('weight') is not None
        and is_unpatched(conv)
    )


def is_foldable(norm: nn.Module) -> bool:
    """Whether a norm is, in evaluation, a factor and an offset per channel."""
    usual = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    if not isinstance(norm, _BatchNorm) or norm.running_mean is None:
        return False
    # A subclass may do more, such as activate; so may pruning and the like, or a patch.
    affine = not norm.affine or norm._parameters.get('weight') is not None
    return affine and type(norm).forward in usual and is_unpatched(norm)


def is_unpatched(module: nn.Module) -> bool:
    """Whether nobody else has given this one module another ``forward``."""
    ours = (NoneType, WeightedForward, FoldedForward, SkippedForward)
    return isinstance(module.__dict__.get('forward'), ours)


class WeightedForward:
    """``forward`` of a gated convolution that can be handed its weights.

    Calling the module with gathered weights runs its forward hooks, so that
    whoever watches convolutions, such as the MACs tracer, still sees them.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        self.conv = conv

    def __call__(
        self,
        x: Tensor,
        weight: Optional[Tensor] = None,
        bias: Optional[Tensor] = None,
        groups: Optional[int] = None,
        plus: Optional[Tensor] = None,
    ) -> Tensor:
        if weight is None:
            return type(self.conv).forward(self.conv, x)
        return convolve(self.conv, x, weight, bias, groups, plus)


class FoldedForward:
    """``forward`` of an ungated convolution that does the work of its norm too.

    Args:
        layer (FoldedLayer): The two.
        relu (bool): Whether a ReLU comes after them, which it does as well where nobody
            looks in between. Defaults to False.
    """

    def __init__(self, layer: FoldedLayer, relu: bool = False) -> None:
        self.layer = layer
        self.relu = relu

    def applies(self) -> bool:
        """Whether the two are one now; the same for both of a pass."""
        if checks.done:
            return True
        training = self.layer.norm.training  # type: ignore[union-attr]
        return not (recording() or training or self in checks.apart)

    def activates(self) -> bool:
        """Whether the ReLU is part of it now."""
        return self.relu and checks.done and self.applies()

    def __call__(self, x: Tensor) -> Tensor:
        conv = self.layer.conv
        if not checks.done:
            # Once for both: a hook may take itself off.
            checks.apart.discard(self)
            if self._disturbed():
                checks.apart.add(self)
        if not self.applies():
            return type(conv).forward(conv, x)
        return self.layer.run(x, self.activates())

    def _disturbed(self) -> bool:
        """Whether one of the two is watched, or no longer what was prepared."""
        conv, norm = self.layer.conv, self.layer.norm
        assert norm is not None
        fits = is_plain_conv(conv) and is_foldable(norm)
        return not fits or is_watched(conv) or is_watched(norm)


class SkippedForward:
    """``forward`` of a norm, or of the ReLU after it, whose work a convolution does.

    Args:
        module (nn.Module): The norm or ReLU.
        folded (FoldedForward): Forward of the convolution.
    """

    def __init__(self, module: nn.Module, folded: FoldedForward) -> None:
        self.module = module
        self.folded = folded

    def __call__(self, x: Tensor) -> Tensor:
        is_norm = self.module is self.folded.layer.norm
        if self.folded.applies() if is_norm else self.folded.activates():
            return x
        return type(self.module).forward(self.module, x)


def why_not(block: GatedBlock) -> Optional[str]:
    """Why a block cannot be run sparsely; None if it can."""
    sites = block.gate_sites()
    for name, conv in gated_convs(block, sites).items():
        module = block.get_submodule(name)
        if not isinstance(module, nn.Conv2d) or not is_plain_conv(module):
            return f'{name} is a {type(module).__name__}'
        if module.groups > 1 and not is_depthwise(module, conv):
            return f'{name} has groups={module.groups}'
    for site in sites:
        for name in site.norms or (site.norm,):
            module = block.get_submodule(name)
            if not is_foldable(module):
                return f'{name} is a {type(module).__name__} and cannot be folded'
    return None


def is_depthwise(conv: nn.Conv2d, gates: GatedConv) -> bool:
    """Whether each channel of a gated convolution is computed from itself."""
    one_each = conv.groups == conv.in_channels == conv.out_channels
    return one_each and conv.groups > 1 and gates.in_gate == gates.out_gate
