# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Convolutions of oneDNN, as PyTorch's own compiler calls them: with the activation inside."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor


def _find(name: str, arguments: int, kind: str = 'default') -> Optional[torch._ops.OpOverload]:
    """An operator of PyTorch's oneDNN library, None if this build lacks it or has
    another one of that name."""
    try:
        found = getattr(getattr(torch.ops.mkldnn, name), kind)
    except (AttributeError, RuntimeError):
        return None
    return found if len(found._schema.arguments) == arguments else None


_CONVOLVE = _find('_convolution_pointwise', 10)
_ACCUMULATE = _find('_convolution_pointwise_', 13, 'binary')
_TURN = _find('_convolution_transpose_pointwise', 11)
_REORDER = _find('_reorder_convolution_weight', 6)

NOTHING: tuple[str, list, str] = 'none', [], ''


ACTIVATIONS: dict[type, tuple[str, list, str]] = {
    nn.ReLU: ('relu', [], ''),
    nn.ReLU6: ('hardtanh', [0.0, 6.0], ''),
    nn.SiLU: ('swish', [], ''),
}
"""What the kernels call them: name, numbers and algorithm."""


def autocasts() -> bool:
    """Whether autocast is on for the CPU."""
    try:
        return torch.is_autocast_enabled('cpu')
    except TypeError:  # before torch 2.4
        return torch.is_autocast_cpu_enabled()


def fits(x: Tensor) -> bool:
    """Whether the kernels take an input."""
    return (
        _CONVOLVE is not None
        and x.dtype == torch.float32
        and x.device.type == 'cpu'
        and x.numel() > 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and torch._C._get_mkldnn_enabled()
        and not autocasts()
    )


def turns(conv: nn.Conv2d) -> bool:
    """Whether :func:`convolve_turned` can stand in for a convolution."""
    return (
        _TURN is not None
        and conv.groups == 1
        and conv.stride == (1, 1)
        and min(_turned_padding(conv)) >= 0
    )


def _turned_padding(conv: Any) -> list[int]:
    sides = zip(conv.kernel_size, conv.dilation, conv.padding, strict=True)
    return [(size - 1) * step - pad for size, step, pad in sides]


def pack(conv: Any, weight: Tensor, x: Tensor, groups: int) -> Tensor:
    """A weight in the layout oneDNN computes with, for :func:`convolve`: others are brought into it
    each time, which is half of the work on small maps. Inputs may be of other sizes."""
    if _REORDER is None:
        return weight
    shape = list(conv.padding), list(conv.stride), list(conv.dilation)
    return _REORDER(weight, *shape, groups, list(x.shape))


def convolve(
    conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Optional[Tensor], groups: int, *act: Any
) -> Tensor:
    """A convolution with other weights, packed or not, and one of :data:`ACTIVATIONS` after it."""
    assert _CONVOLVE is not None
    return _CONVOLVE(x, weight, bias, conv.padding, conv.stride, conv.dilation, groups, *act)


def accumulates(x: Tensor) -> bool:
    """Whether :func:`accumulate` can add to a tensor."""
    return _ACCUMULATE is not None and fits(x)


def accumulate(
    conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Optional[Tensor], to: Tensor, act: str
) -> Tensor:
    """:func:`convolve`, added to a tensor of the shape of the result."""
    assert _ACCUMULATE is not None
    shape = conv.padding, conv.stride, conv.dilation, conv.groups
    after: tuple = ('relu' if act == 'relu' else None), [], None
    return _ACCUMULATE(to, x, weight, bias, *shape, 'add', 1.0, *after)


def convolve_turned(
    conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Optional[Tensor], *act: Any
) -> Tensor:
    """:func:`convolve` as the transposed convolution that computes the same.

    Its weight, upside down, has input channels first, so that some of them are whole rows: taking
    those is copying memory, where elsewhere it is picking values one by one.
    """
    assert _TURN is not None
    shape = _turned_padding(conv), [0, 0], conv.stride, conv.dilation
    return _TURN(x, weight, bias, *shape, 1, *act)
