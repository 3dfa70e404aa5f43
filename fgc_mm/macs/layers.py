# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Dense MACs of a layer from one call of it."""

from __future__ import annotations

from math import prod
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .formulas import conv_macs, linear_macs

_CONV_ATTRIBUTES = ('in_channels', 'out_channels', 'kernel_size', 'groups')


def is_conv(module: nn.Module) -> bool:
    """Whether a module is a convolution: torch's own of any dimension, or one
    that has their attributes and weight, such as mmcv's deformable ones."""
    if isinstance(module, _ConvNd):
        return True
    weight = getattr(module, 'weight', None)
    return (
        isinstance(weight, nn.Parameter)
        and weight.dim() > 2
        and all(hasattr(module, name) for name in _CONV_ATTRIBUTES)
    )


def is_counted(module: nn.Module) -> bool:
    """Whether a module's calls are counted: convolutions and linear layers.

    Not counted is what is not such a module: functional convolutions, the
    projections inside ``nn.MultiheadAttention``, the sampling of deformable
    convolutions, RoI pooling, non-maximum suppression and matrix products.
    """
    return isinstance(module, nn.Linear) or is_conv(module)


def call_macs(layer: Any, args: tuple, output: Tensor) -> int:
    """Dense MACs of one call, over the whole batch.

    Also of a call that computes only some of the output's channels.

    Args:
        layer (nn.Module): A layer for which :func:`is_counted` holds.
        args (tuple): What it was called with.
        output (Tensor): What it returned.
    """
    if isinstance(layer, nn.Linear):
        return linear_macs(layer.in_features, layer.out_features, prod(output.shape[:-1]))
    if isinstance(layer, _ConvTransposeNd):
        positions = args[0].numel() // layer.in_channels
    else:
        # Not by the output's channels: sparse execution computes fewer of them.
        dims = len(layer.kernel_size)
        batch = output.size(0) if output.dim() == dims + 2 else 1
        positions = batch * prod(output.shape[-dims:])
    return conv_macs(
        layer.in_channels, layer.out_channels, layer.kernel_size, (positions,), layer.groups
    )
