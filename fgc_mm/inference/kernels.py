# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Convolutions of oneDNN with prepared weights, as PyTorch's own compiler calls them."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor

Activation = tuple[str, list, str]


def _find(name: str, arguments: int) -> Optional[torch._ops.OpOverload]:
    """An operator of PyTorch's oneDNN library, None if this build lacks it or has
    another one of that name."""
    try:
        found = getattr(torch.ops.mkldnn, name).default
    except (AttributeError, RuntimeError):
        return None
    return found if len(found._schema.arguments) == arguments else None


_CONVOLVE = _find('_convolution_pointwise', 10)
_TURN = _find('_convolution_transpose_pointwise', 11)
_REORDER = _find('_reorder_convolution_weight', 6)


def activation(act: Optional[nn.Module]) -> Activation:
    """How the kernels call an activation: name, numbers and algorithm; 'none' if they do not."""
    if type(act) is nn.ReLU:
        return 'relu', [], ''
    if type(act) is nn.ReLU6:
        return 'hardtanh', [0.0, 6.0], ''
    if type(act) is nn.SiLU:
        return 'swish', [], ''
    return 'none', [], ''


def autocasts() -> bool:
    """Whether autocast is on for the CPU."""
    try:
        return torch.is_autocast_enabled('cpu')
    except TypeError:  # before torch 2.4
        return torch.is_autocast_cpu_enabled()


def fits(x: Tensor) -> bool:
    """Whether :func:`convolve` takes an input."""
    return (
        _CONVOLVE is not None
        and x.dtype == torch.float32
        and x.device.type == 'cpu'
        and x.numel() > 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and torch._C._get_mkldnn_enabled()
        and not autocasts()
    )


def takes(layer: Any) -> bool:
    """Whether :func:`convolve` can stand in for a layer."""
    return isinstance(layer, nn.Conv2d) and not isinstance(layer.padding, str)


def turns(conv: nn.Conv2d) -> bool:
    """Whether :func:`convolve_turned` can stand in for a convolution."""
    return (
        _TURN is not None
        and conv.groups == 1
        and conv.stride == (1, 1)
        and conv.kernel_size != (1, 1)
        and min(_turned_padding(conv)) >= 0
    )


def _turned_padding(conv: nn.Conv2d) -> list[int]:
    assert not isinstance(conv.padding, str)
    sides = zip(conv.kernel_size, conv.dilation, conv.padding, strict=True)
    return [(size - 1) * step - pad for size, step, pad in sides]


def pack(conv: nn.Conv2d, weight: Tensor, x: Tensor, groups: int) -> Optional[Tensor]:
    """A weight in the layout oneDNN computes with.

    A convolution brings its weight into that layout first, each time: on small maps
    that is half of its work.

    Args:
        conv (nn.Conv2d): Tells stride, padding and dilation.
        weight (Tensor): The weight.
        x (Tensor): An input. Others may be of other sizes.
        groups (int): Number of groups.

    Returns:
        Tensor: An opaque tensor for :func:`convolve`, None if there is no way to
        make one.
    """
    if _REORDER is None:
        return None
    shape = list(conv.padding), list(conv.stride), list(conv.dilation)  # type: ignore[arg-type]
    return _REORDER(weight, *shape, groups, list(x.shape))


def convolve(
    conv: nn.Conv2d,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    groups: int,
    *act: Any,
) -> Tensor:
    """A convolution with other weights, packed or not, and the activation after it.

    Args:
        conv (nn.Conv2d): Tells stride, padding and dilation.
        x (Tensor): B x C x H x W, channels last.
        weight (Tensor): The weight.
        bias (Tensor, optional): The bias.
        groups (int): Number of groups.
        act: See :func:`activation`.
    """
    assert _CONVOLVE is not None
    return _CONVOLVE(x, weight, bias, conv.padding, conv.stride, conv.dilation, groups, *act)


def convolve_turned(
    conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Optional[Tensor], *act: Any
) -> Tensor:
    """:func:`convolve` as the transposed convolution that computes the same.

    Its weight has input channels first, so that some of them are whole rows: taking
    those is copying memory, where elsewhere it is picking values one by one.

    Args:
        conv (nn.Conv2d): One that :func:`turns`.
        x (Tensor): B x C x H x W, channels last.
        weight (Tensor): C x outputs x kernel, upside down and channels last.
        bias (Tensor, optional): The bias.
        act: See :func:`activation`.
    """
    assert _TURN is not None
    shape = _turned_padding(conv), [0, 0], conv.stride, conv.dilation
    return _TURN(x, weight, bias, *shape, 1, *act)
