# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Convolutions with other weights than a module's own, by the fastest way there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from . import kernels
from .stamp import checks

# On larger maps the convolution is the faster of the two on a CPU; a product can add to
# a shortcut, which spares more.
PRODUCT_POSITIONS = 512
SUM_POSITIONS = 8192


def is_product(conv: nn.Conv2d) -> bool:
    """Whether a convolution is a product of matrices in channels-last layout."""
    return (
        conv.kernel_size == (1, 1)
        and conv.stride == (1, 1)
        and conv.padding in ((0, 0), 'valid', 'same')
        and conv.groups == 1
    )


def convolve(
    conv: nn.Conv2d,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    groups: Optional[int] = None,
    plus: Optional[Tensor] = None,
    relu: bool = False,
    spend: bool = False,
) -> Tensor:
    """A convolution with other weights, of any number of channels, even none.

    Args:
        conv (nn.Conv2d): Tells stride, padding, dilation and groups.
        x (Tensor): B x C x H x W.
        weight (Tensor): Some of the rows and columns of the weight; of a
            pointwise convolution also without its last two dimensions.
        bias (Tensor, optional): One value for each row.
        groups (int, optional): Number of groups. Defaults to None, the
            convolution's.
        plus (Tensor, optional): What to add to the result. Defaults to None.
        relu (bool): Whether to take the ReLU of the result. Defaults to False.
        spend (bool): Whether the result may take the place of ``plus``. Defaults to
            False.
    """
    groups = conv.groups if groups is None else groups
    if not weight.numel():
        assert bias is not None
        size = _out_size(conv, x)
        out = bias[None, :, None, None].expand(x.size(0), -1, *size).to(x.dtype, copy=True)
    elif _multiplies(conv, x, plus is not None):
        weight = weight if weight.dim() == 2 else weight[:, :, 0, 0]
        return _multiply(x, weight, bias, plus, relu, spend)
    else:
        weight = weight[:, :, None, None] if weight.dim() == 2 else weight
        if checks.done and not isinstance(conv.padding, str) and kernels.fits(x):
            return compute(conv, x, weight, bias, groups, plus, relu, spend)
        out = F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, groups)
    out = out if plus is None else out.add_(plus)
    return out.relu_() if relu else out


def compute(
    conv: nn.Conv2d,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    groups: int,
    plus: Optional[Tensor],
    relu: bool,
    spend: bool,
) -> Tensor:
    """:func:`convolve` by :mod:`.kernels`."""
    if plus is None:
        return kernels.convolve(conv, x, weight, bias, groups, relu)
    if (
        spend
        and _fills(plus, x, weight.size(0), _out_size(conv, x))
        and kernels.accumulates(x, plus)
    ):
        return kernels.accumulate(conv, x, weight, bias, groups, relu, plus)
    out = kernels.convolve(conv, x, weight, bias, groups, False).add_(plus)
    return out.relu_() if relu else out


def _fills(plus: Tensor, x: Tensor, channels: int, size: Sequence[int]) -> bool:
    """Whether a sum has the shape of the result and is not spread over it."""
    return plus.shape == (x.size(0), channels, *size)


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    plus: Optional[Tensor],
    relu: bool,
    spend: bool,
) -> Tensor:
    """A pointwise convolution in channels-last layout as a product."""
    batch, _, height, width = x.shape
    outs = weight.size(0)
    rows = x.permute(0, 2, 3, 1).flatten(0, 2)
    if plus is None:
        out = rows.mm(weight.t())
    else:
        # Summing up in the shortcut spares a pass over it.
        start = plus.permute(0, 2, 3, 1).reshape(-1, outs)
        if spend and plus.dtype == x.dtype and _fills(plus, x, outs, (height, width)):
            out = start.addmm_(rows, weight.t())
        else:
            out = torch.addmm(start, rows, weight.t())
    # The bias comes with the ReLU, in one pass over what was just written.
    if bias is not None:
        out = torch._add_relu_(out, bias) if relu else out.add_(bias)
    elif relu:
        out.relu_()
    return out.view(batch, height, width, outs).permute(0, 3, 1, 2)


def _multiplies(conv: nn.Conv2d, x: Tensor, adds: bool) -> bool:
    """Whether a product of matrices is the faster way to convolve."""
    if conv.kernel_size != (1, 1) or not is_product(conv) or x.device.type != 'cpu':
        return False
    most = SUM_POSITIONS if adds else PRODUCT_POSITIONS
    few = x.size(0) * x.size(2) * x.size(3) <= most
    return (
        few
        and x.dtype in (torch.float32, torch.float64)
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _out_size(conv: nn.Conv2d, x: Tensor) -> list[int]:
    if isinstance(conv.padding, str):
        pads = (
            [0, 0]
            if conv.padding == 'valid'
            else [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        )
    else:
        pads = [2 * int(pad) for pad in conv.padding]
    return [
        (x.size(2 + i) + pads[i] - conv.dilation[i] * (conv.kernel_size[i] - 1) - 1)
        // conv.stride[i]
        + 1
        for i in (0, 1)
    ]
