# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Multiply-accumulates (MACs) as pure functions of shapes and masks.

Counted are the products of weights and inputs of convolutions and linear
layers, one MAC each. Biases, norms, activations, pooling, resizing and
elementwise arithmetic (the mask itself among it) count nothing.
"""

from __future__ import annotations

from math import prod
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


def is_counted(module: nn.Module) -> bool:
    """Whether a module's calls are counted: linear layers and convolutions, torch's own of any
    dimension or such as mmcv's deformable ones, which have their attributes and weight.

    Not counted is what is not such a module: functional convolutions, the
    projections inside ``nn.MultiheadAttention``, the sampling of deformable
    convolutions, RoI pooling, non-maximum suppression and matrix products.
    """
    if isinstance(module, (nn.Linear, _ConvNd)):
        return True
    weight = getattr(module, 'weight', None)
    return (
        isinstance(weight, nn.Parameter)
        and weight.dim() > 2
        and all(hasattr(module, n) for n in ('in_channels', 'out_channels', 'kernel_size'))
    )


def call_macs(layer: Any, args: tuple, output: Tensor) -> int:
    """Dense MACs of one call, over the whole batch: at each position each weight is used once.

    Also of a call that computes only some of the output's channels.

    Args:
        layer (nn.Module): A layer for which :func:`is_counted` holds.
        args (tuple): What it was called with.
        output (Tensor): What it returned.
    """
    if isinstance(layer, nn.Linear):
        positions = prod(output.shape[:-1])
    elif isinstance(layer, _ConvTransposeNd):
        positions = args[0].numel() // layer.in_channels
    else:
        dims = len(layer.kernel_size)
        batch = output.size(0) if output.dim() == dims + 2 else 1
        positions = batch * prod(output.shape[-dims:])
    return positions * layer.weight.numel()


def open_share(
    in_mask: Optional[Tensor] = None, out_mask: Optional[Tensor] = None, groups: int = 1
) -> Tensor:
    """Share of a convolution's MACs left between its open channels.

    In a plain convolution this is (open inputs / inputs) x (open outputs /
    outputs). In a grouped one a channel meets its own group only, so it is the
    mean over the groups of that product: a closed group costs nothing, and a
    depthwise convolution with one mask on both sides counts each open channel
    once.

    Args:
        in_mask (Tensor, optional): B x C_in, 1 where the input channel is open;
            None if all are. Defaults to None.
        out_mask (Tensor, optional): B x C_out, likewise. Defaults to None.
        groups (int): Number of groups. Defaults to 1.

    Returns:
        Tensor: One number per image, float64; a single 1.0 without any mask.
    """
    share = torch.ones(1, 1, dtype=torch.float64)
    for mask in (in_mask, out_mask):
        if mask is not None:
            shape = (mask.size(0), groups, mask.size(1) // groups)  # -1 fails for no images
            grouped = mask.double().reshape(shape).mean(dim=2)
            share = share.to(mask.device) * grouped
    return share.mean(dim=1)
