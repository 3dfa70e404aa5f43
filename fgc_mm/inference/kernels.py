# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Convolutions of oneDNN with prepared weights, as PyTorch's own compiler calls them."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn as nn
from torch import Tensor


def _find(name: str, arguments: int, overload: str = 'default') -> Optional[torch._ops.OpOverload]:
    """An operator of PyTorch's oneDNN library, None if this build lacks it or has
    another one of that name."""
    try:
        found = getattr(getattr(torch.ops.mkldnn, name), overload)
    except (AttributeError, RuntimeError):
        return None
    return found if len(found._schema.arguments) == arguments else None


_CONVOLVE = _find('_convolution_pointwise', 10)
_ACCUMULATE = _find('_convolution_pointwise_', 13, 'binary')
_TURN = _find('_convolution_transpose_pointwise', 11)
_REORDER = _find('_reorder_convolution_weight', 6)
ACCUMULATES = _ACCUMULATE is not None
"""Whether there is :func:`accumulate`."""


def fits(x: Tensor) -> bool:
    """Whether :func:`convolve` takes an input."""
    return (
        _CONVOLVE is not None
        and x.dtype == torch.float32
        and x.device.type == 'cpu'
        and x.numel() > 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and torch._C._get_mkldnn_enabled()
    )


def accumulates(x: Tensor, plus: Tensor) -> bool:
    """Whether :func:`accumulate` takes an input and a sum of the right size."""
    return (
        _ACCUMULATE is not None
        and fits(x)
        and plus.dtype == torch.float32
        and plus.is_contiguous(memory_format=torch.channels_last)
    )


def turns(conv: nn.Conv2d) -> bool:
    """Whether :func:`convolve_turned` can stand in for a convolution."""
    return (
        _TURN is not None
        and conv.groups == 1
        and conv.stride == (1, 1)
        and conv.kernel_size != (1, 1)
        and not isinstance(conv.padding, str)
        and min(_turned_padding(conv)) >= 0
    )


def _turned_padding(conv: nn.Conv2d) -> list[int]:
    assert not isinstance(conv.padding, str)
    sides = zip(conv.kernel_size, conv.dilation, conv.padding, strict=True)
    return [(size - 1) * step - pad for size, step, pad in sides]


def pack(conv: nn.Conv2d, weight: Tensor, x: Tensor) -> Optional[Tensor]:
    """A weight in the layout oneDNN computes with.

    A convolution brings its weight into that layout first, each time: on small maps
    that is half of its work.

    Args:
        conv (nn.Conv2d): Tells stride, padding, dilation and groups.
        weight (Tensor): The weight.
        x (Tensor): An input. Others may be of other sizes.

    Returns:
        Tensor: An opaque tensor for :func:`convolve`, None if there is no way to
        make one.
    """
    if _REORDER is None or isinstance(conv.padding, str):
        return None
    return _REORDER(
        weight,
        list(conv.padding),
        list(conv.stride),
        list(conv.dilation),
        conv.groups,
        list(x.shape),
    )


def convolve(
    conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Optional[Tensor], groups: int, relu: bool
) -> Tensor:
    """A convolution with other weights, packed or not, and the ReLU after it.

    Args:
        conv (nn.Conv2d): Tells stride, padding and dilation.
        x (Tensor): B x C x H x W, channels last.
        weight (Tensor): The weight.
        bias (Tensor, optional): The bias.
        groups (int): Number of groups.
        relu (bool): Whether to take the ReLU of the result.
    """
    assert _CONVOLVE is not None
    act = 'relu' if relu else 'none'
    shape = conv.padding, conv.stride, conv.dilation
    return _CONVOLVE(x, weight, bias, *shape, groups, act, [], '')


def accumulate(
    conv: nn.Conv2d,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    groups: int,
    relu: bool,
    plus: Tensor,
) -> Tensor:
    """:func:`convolve` that adds its result to ``plus``, in place, before the ReLU.

    On large maps the two passes and the memory this spares take longer than a
    pointwise convolution itself.
    """
    assert _ACCUMULATE is not None
    act = 'relu' if relu else None
    shape = conv.padding, conv.stride, conv.dilation
    return _ACCUMULATE(plus, x, weight, bias, *shape, groups, 'add', 1.0, act, [], None)


def convolve_turned(
    conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Optional[Tensor], relu: bool
) -> Tensor:
    """:func:`convolve` as the transposed convolution that computes the same.

    Its weight has input channels first, so that some of them are whole rows: taking
    those is copying memory, where elsewhere it is picking values one by one.

    Args:
        conv (nn.Conv2d): One that :func:`turns`.
        x (Tensor): B x C x H x W, channels last.
        weight (Tensor): C x outputs x kernel, upside down and channels last.
        bias (Tensor, optional): The bias.
        relu (bool): Whether to take the ReLU of the result.
    """
    assert _TURN is not None
    act = 'relu' if relu else 'none'
    shape = _turned_padding(conv), [0, 0], conv.stride, conv.dilation
    return _TURN(x, weight, bias, *shape, 1, act, [], '')
