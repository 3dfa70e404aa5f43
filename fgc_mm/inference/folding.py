# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Convolutions with their batch norm folded in, prepared once."""

from __future__ import annotations

import threading
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor

from . import kernels
from .convolution import compute, convolve, is_product
from .stamp import Source, Stamp, checks

_Prepared = tuple[Stamp, Tensor, Tensor]


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
        self._prepared: Optional[_Prepared] = None
        self._packed: Optional[tuple[_Prepared, Optional[Tensor]]] = None
        self._turned: Optional[tuple[_Prepared, Tensor]] = None

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
        _, weight, bias = self._current()
        weight, bias = self._unpadded(weight, bias, rows is None, columns is None)
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
        # Read once: another thread may prepare weights anew in between.
        prepared = self._current()
        weight, bias = self._unpadded(*prepared[1:])
        packed = self._pack(prepared, weight, x) if checks.done and kernels.fits(x) else None
        if packed is None:
            return convolve(self.conv, x, weight, bias, None, plus, relu, spend)
        return compute(self.conv, x, packed, bias, self.conv.groups, plus, relu, spend)

    def turns(self, x: Tensor, columns: int) -> bool:
        """Whether :meth:`run_turned` is the better way for so many input channels: where
        there is more to gather than the output has values."""
        kernel = self.conv.kernel_size[0] * self.conv.kernel_size[1]
        positions = x.size(0) * x.size(2) * x.size(3)
        many = 2 * kernel * columns >= positions
        return self.channels_last and many and kernels.turns(self.conv) and kernels.fits(x)

    def run_turned(self, x: Tensor, columns: Tensor, relu: bool, plus: Optional[Tensor]) -> Tensor:
        """Convolve some input channels with all output channels, see
        :func:`kernels.convolve_turned`.

        Args:
            x (Tensor): B x C x H x W, where :meth:`turns`.
            columns (Tensor): The input channels.
            relu (bool): Whether to take the ReLU of the result.
            plus (Tensor, optional): What to add to the result before that.
        """
        prepared = self._current()
        weight, shift = self._unpadded(*prepared[1:], columns=False)
        known = self._turned
        if known is None or known[0] is not prepared:
            turned = weight.flip(2, 3).permute(1, 2, 3, 0).contiguous()
            known = self._turned = (prepared, turned)
        taken = known[1].index_select(0, columns).permute(0, 3, 1, 2)
        if plus is None:
            return kernels.convolve_turned(self.conv, x, taken, shift, relu)
        out = kernels.convolve_turned(self.conv, x, taken, shift, False)
        return torch._add_relu_(out, plus) if relu else out.add_(plus)

    def _pack(self, prepared: _Prepared, weight: Tensor, x: Tensor) -> Optional[Tensor]:
        """The weight of a preparation in the layout of the kernels, made once."""
        known = self._packed
        if known is None or known[0] is not prepared:
            full = weight[:, :, None, None] if weight.dim() == 2 else weight
            full = full.contiguous(memory_format=torch.channels_last)
            known = self._packed = (prepared, kernels.pack(self.conv, full, x))
        return known[1]

    def _current(self) -> _Prepared:
        """Stamp, weight and bias as they are now."""
        if self._prepared is None or not checks.done:
            self.refresh()
        prepared = self._prepared
        assert prepared is not None
        return prepared

    def _unpadded(
        self, weight: Tensor, bias: Tensor, rows: bool = True, columns: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Weight and bias without the padding of rows and columns."""
        if rows and self.pads[0]:
            weight, bias = weight[:-2], bias[:-2]
        if columns and self.pads[1]:
            weight = weight[:, :-2]
        return weight, bias

    def refresh(self) -> None:
        """Prepare the weights, anew if the parameters have changed."""
        prepared = self._prepared
        if prepared is None or not prepared[0].holds():
            with self._lock:
                self._prepared = (Stamp(self.sources()), *self._fold())

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
            lines = lines.gather(1, columns.expand(lines.size(0), -1))
            weight = lines.view(*weight.shape[:3], columns.size(0))
        return weight.permute(0, 3, 1, 2)

    def sources(self) -> list[Source]:
        """What the prepared weights are made of."""
        sources: list[Source] = [(self.conv._parameters, key) for key in ('weight', 'bias')]
        sources.append((self.conv.__dict__, 'forward'))
        if self.norm is not None:
            sources += [(self.norm.__dict__, key) for key in ('eps', 'forward')]
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
        left_out = ('_lock', '_prepared', '_packed', '_turned')
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.reset()
