# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Convolutions with their batch norm folded in, prepared once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import NoneType
from typing import Any, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn.bricks.wrappers import Conv2d as MMConv2d
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from . import kernels
from .stamp import Source, Stamp, checks

# On larger maps the convolution is the faster of the two on a CPU; a product can add to
# a shortcut, which spares more.
PRODUCT_POSITIONS = 2048
SUM_POSITIONS = 8192
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
    # A subclass may do something to the weight first, such as standardise it; so may
    # pruning and the like, which leave no parameter of that name, or a patch.
    return (
        type(conv) in (nn.Conv2d, MMConv2d)
        and conv.padding_mode == 'zeros'
        and conv._parameters.get('weight') is not None
        and isinstance(conv.__dict__.get('forward'), (NoneType, WeightedForward, FoldedForward))
    )


def is_product(conv: nn.Conv2d) -> bool:
    """Whether a convolution is a product of matrices in channels-last layout."""
    return (
        conv.kernel_size == (1, 1)
        and conv.stride == (1, 1)
        and conv.padding in ((0, 0), 'valid', 'same')
        and conv.groups == 1
    )


def is_foldable(norm: nn.Module) -> bool:
    """Whether a norm is, in evaluation, a factor and an offset per channel."""
    usual = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    known = isinstance(norm, _BatchNorm) and norm.running_mean is not None
    # A subclass may do more, such as activate.
    return known and type(norm).forward in usual


class FoldedLayer:
    """Weight and bias of a convolution and its batch norm as one convolution.

    They are computed at the first use and again when the parameters have
    changed, see :class:`~fgc_mm.inference.stamp.Stamp`.

    Args:
        conv (nn.Conv2d): The convolution.
        norm (nn.Module, optional): The batch norm after it. Defaults to None.
        channels_last (bool): Lay the weight out for channels-last inputs.
            Defaults to False.
        inputs_first (bool): Lay the weight of a pointwise convolution out such
            that input channels can be taken as whole rows, for
            :func:`convolve` to multiply with. Defaults to False.
        pads (tuple[bool, bool]): Whether rows and columns can be padded, that
            is two more can be taken: the output channel after the last is 1 everywhere,
            the next 0; as an input the first stands for the bias of a
            pointwise convolution, the other is not read. Defaults to neither.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        norm: Optional[nn.Module] = None,
        channels_last: bool = False,
        inputs_first: bool = False,
        pads: tuple[bool, bool] = (False, False),
    ) -> None:
        self.conv = conv
        self.norm = norm
        self.channels_last = channels_last
        self.inputs_first = inputs_first and channels_last and is_product(conv)
        self.pads = pads
        self.reset()

    def reset(self) -> None:
        """Forget what was prepared."""
        self._lock = threading.Lock()
        self._prepared: Optional[tuple[Stamp, Tensor, Tensor]] = None
        self._packed: Optional[tuple[tuple, Optional[Tensor]]] = None

    def weights(
        self, rows: Optional[Tensor] = None, columns: Optional[Tensor] = None
    ) -> tuple[Tensor, Tensor]:
        """Weight and bias, prepared anew if the parameters have changed.

        Args:
            rows (Tensor, optional): Output channels to take. Defaults to None,
                all.
            columns (Tensor, optional): Input channels to take. Defaults to
                None, all.
        """
        if self._prepared is None or not checks.done:
            self.refresh()
        prepared = self._prepared
        assert prepared is not None
        _, weight, bias = prepared
        if rows is None and self.pads[0]:
            weight, bias = weight[:-2], bias[:-2]
        if columns is None and self.pads[1]:
            weight = weight[:, :-2]
        if rows is not None or columns is not None:
            weight = self._gather(weight, rows, columns)
        return weight, bias if rows is None else bias.index_select(0, rows)

    def run(
        self, x: Tensor, relu: bool = False, plus: Optional[Tensor] = None, spend: bool = False
    ) -> Tensor:
        """Convolve with all channels.

        Args:
            x (Tensor): B x C x H x W.
            relu (bool): Whether to take the ReLU of the result. Defaults to
                False.
            plus (Tensor, optional): See :func:`convolve`. Defaults to None.
            spend (bool): See :func:`convolve`. Defaults to False.
        """
        weight, bias = self.weights()
        packed = self._pack(weight, x) if checks.done and kernels.fits(x) else None
        if packed is None:
            return convolve(self.conv, x, weight, bias, None, plus, relu, spend)
        return _compute(self.conv, x, packed, bias, self.conv.groups, plus, relu, spend)

    def _pack(self, weight: Tensor, x: Tensor) -> Optional[Tensor]:
        """The weight in the layout of the kernels, made once."""
        known, prepared = self._packed, self._prepared
        if known is None or known[0] is not prepared:
            assert prepared is not None
            full = weight[:, :, None, None] if weight.dim() == 2 else weight
            full = full.contiguous(memory_format=torch.channels_last)
            known = self._packed = (prepared, kernels.pack(self.conv, full, x))
        return known[1]

    def refresh(self) -> None:
        """Prepare the weights, anew if the parameters have changed."""
        prepared = self._prepared
        if prepared is None or not prepared[0].holds():
            with self._lock:
                self._prepared = (Stamp(self._sources()), *self._fold())

    def _gather(self, weight: Tensor, rows: Optional[Tensor], columns: Optional[Tensor]) -> Tensor:
        """Some output and input channels of a weight, in its own layout."""
        if self.inputs_first:
            pairs = weight.t()  # as it lies in memory
            pairs = pairs if columns is None else pairs.index_select(0, columns)
            return (pairs if rows is None else pairs.index_select(1, rows)).t()
        if not self.channels_last:
            weight = weight if rows is None else weight.index_select(0, rows)
            return weight if columns is None else weight.index_select(1, columns)
        weight = weight.permute(0, 2, 3, 1)  # as it lies in memory
        if rows is not None:
            weight = weight.index_select(0, rows)
        if columns is not None:
            # gather runs on all cores and over two dimensions, index_select on one.
            lines = weight.reshape(-1, weight.size(3))
            lines = lines.gather(1, columns.expand(len(lines), -1))
            weight = lines.view(*weight.shape[:3], len(columns))
        return weight.permute(0, 3, 1, 2)

    def _sources(self) -> list[Source]:
        sources: list[Source] = [(self.conv._parameters, key) for key in ('weight', 'bias')]
        if self.norm is not None:
            sources += [(self.norm._parameters, key) for key in ('weight', 'bias')]
            sources += [(self.norm._buffers, key) for key in ('running_mean', 'running_var')]
        return sources

    @torch.no_grad()
    def _fold(self) -> tuple[Tensor, Tensor]:
        weight = self.conv.weight.detach()
        bias = self.conv.bias
        wide = torch.promote_types(weight.dtype, torch.float32)
        shift = weight.new_zeros(weight.size(0), dtype=wide) if bias is None else bias.to(wide)
        folded = weight.to(wide)
        if self.norm is not None:
            norm: Any = self.norm
            scale = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
            if norm.weight is not None:
                scale = scale * norm.weight.to(wide)
            shift = (shift - norm.running_mean.to(wide)) * scale
            if norm.bias is not None:
                shift = shift + norm.bias.to(wide)
            folded = folded * scale[:, None, None, None]
        folded, shift = self._pad(folded, shift)
        folded = folded.to(weight.dtype)
        if self.inputs_first:
            pairs = folded[:, :, 0, 0].t().clone(memory_format=torch.contiguous_format)
            return pairs.t(), shift.to(weight.dtype)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        folded = folded.contiguous(memory_format=layout)
        return folded.clone(memory_format=layout), shift.to(weight.dtype)

    def _pad(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = self.pads
        if columns:
            more = weight.new_zeros(len(weight), 2, *weight.shape[2:])
            if is_product(self.conv):
                more[:, 0, 0, 0] = bias
            weight = torch.cat([weight, more], dim=1)
        if rows:
            weight = torch.cat([weight, weight.new_zeros(2, *weight.shape[1:])])
            bias = torch.cat([bias, bias.new_tensor([1, 0])])
        return weight, bias

    def __getstate__(self) -> dict:
        # Locks cannot be copied, and weights are prepared again in a moment.
        left_out = ('_lock', '_prepared', '_packed')
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.reset()


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
        out = _multiply(x, weight, bias, plus, spend)
        return out.relu_() if relu else out
    else:
        weight = weight[:, :, None, None] if weight.dim() == 2 else weight
        if checks.done and not isinstance(conv.padding, str) and kernels.fits(x):
            return _compute(conv, x, weight, bias, groups, plus, relu, spend)
        out = F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, groups)
    out = out if plus is None else out.add_(plus)
    return out.relu_() if relu else out


def _compute(
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
    x: Tensor, weight: Tensor, bias: Optional[Tensor], plus: Optional[Tensor], spend: bool
) -> Tensor:
    """A pointwise convolution in channels-last layout as a product."""
    pixels = x.permute(0, 2, 3, 1)
    rows, shape = pixels.flatten(0, 2), (*pixels.shape[:3], len(weight))
    if plus is None:
        out = rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    else:
        # Summing up in the shortcut spares a pass over it.
        start = plus.permute(0, 2, 3, 1).reshape(-1, len(weight))
        if spend and plus.dtype == x.dtype and _fills(plus, x, len(weight), x.shape[2:]):
            start = start if bias is None else start.add_(bias)
            out = start.addmm_(rows, weight.t())
        elif bias is None:
            out = torch.addmm(start, rows, weight.t())
        else:
            out = (start + bias).addmm_(rows, weight.t())
    return out.view(shape).permute(0, 3, 1, 2)


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
        return not (recording() or self.layer.norm.training)  # type: ignore[union-attr]

    def activates(self) -> bool:
        """Whether the ReLU is part of it now."""
        return self.relu and checks.done and self.applies()

    def __call__(self, x: Tensor) -> Tensor:
        conv = self.layer.conv
        if not self.applies():
            return type(conv).forward(conv, x)
        return self.layer.run(x, self.activates())


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
