# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Multiply-accumulates (MACs) as pure functions of shapes and masks.

Counted are the products of weights and inputs of convolutions and linear
layers, one MAC each. Biases, norms, activations, pooling, resizing and
elementwise arithmetic (the mask itself among it) count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Optional

import torch
from torch import Tensor


def conv_macs(
    in_channels: int,
    out_channels: int,
    kernel_size: Sequence[int],
    out_size: Sequence[int],
    groups: int = 1,
) -> int:
    """MACs of a convolution for one image.

    Args:
        in_channels (int): Channels of the input.
        out_channels (int): Channels of the output.
        kernel_size (Sequence[int]): Size of the kernel.
        out_size (Sequence[int]): Size of the output, H x W; of the input for a
            transposed convolution.
        groups (int): Number of groups. Defaults to 1.

    Returns:
        int: Number of MACs.

    Example:
        >>> conv_macs(3, 64, (7, 7), (112, 112))
        118013952
    """
    return prod(out_size) * prod(kernel_size) * out_channels * (in_channels // groups)


def linear_macs(in_features: int, out_features: int, rows: int = 1) -> int:
    """MACs of a linear layer.

    Args:
        in_features (int): Width of the input.
        out_features (int): Width of the output.
        rows (int): Number of vectors it is applied to. Defaults to 1.
    """
    return rows * in_features * out_features


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
