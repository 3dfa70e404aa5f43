# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The usual case of a gated block with as little Python as possible.

Between two large convolutions nothing of an interpreter is in the caches any more, so every
call that is left out counts. This is what :class:`~fgc_mm.inference.sparse_block.SparseBlock`
does on a CPU for images that run together on just their open channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor

from ..runtime.module_hooks import tell
from . import kernels
from .convolution import PRODUCT_POSITIONS, SUM_POSITIONS, is_product
from .folding import FoldedLayer

_LAST = torch.channels_last


class QuickConv:
    """A convolution of a block with all that is known before the image comes.

    Args:
        folded (FoldedLayer): Its prepared weights.
        in_gate (str, optional): Gate of its inputs.
        out_gate (str, optional): Gate of its outputs.
    """

    def __init__(
        self, folded: FoldedLayer, in_gate: Optional[str], out_gate: Optional[str]
    ) -> None:
        conv = folded.conv
        assert not isinstance(conv.padding, str)
        self.folded = folded
        self.conv = conv
        self.in_gate = in_gate or ''
        self.out_gate = out_gate or ''
        self.outs = conv.out_channels
        self.size = conv.kernel_size
        self.kernel = conv.kernel_size[0] * conv.kernel_size[1]
        self.product = is_product(conv)
        self.keeps_size = conv.stride == (1, 1) and all(
            2 * pad == step * (size - 1)
            for pad, step, size in zip(conv.padding, conv.dilation, conv.kernel_size, strict=True)
        )
        self._known: Optional[tuple] = None

    @staticmethod
    def fits(folded: FoldedLayer) -> bool:
        """Whether a convolution can be run this way."""
        conv = folded.conv
        return folded.channels_last and conv.groups == 1 and not isinstance(conv.padding, str)

    def _current(self) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Preparation, weight as it lies in memory with a line for each channel that is
        gathered, bias with and without its padding."""
        prepared = self.folded._current()
        known = self._known
        if known is None or known[0] is not prepared:
            _, weight, bias = prepared
            if self.folded.inputs_first:
                lines = weight.t()
            else:
                lines = weight.permute(0, 2, 3, 1).flatten(1)
            known = self._known = (prepared, lines, bias, bias[: self.outs])
        return known

    def run(
        self,
        x: Tensor,
        rows: Optional[Tensor],
        columns: Optional[Tensor],
        relu: bool,
        plus: Optional[Tensor],
        spend: bool,
    ) -> Tensor:
        """Convolve with some channels.

        Args:
            x (Tensor): B x C x H x W, channels last.
            rows (Tensor, optional): Output channels to compute, None for all.
            columns (Tensor, optional): The input channels ``x`` has, None for all.
            relu (bool): Whether to take the ReLU of the result.
            plus (Tensor, optional): What to add before that, channels last.
            spend (bool): Whether the result may take the place of ``plus``.
        """
        folded = self.folded
        if rows is None and columns is None:
            return folded.run(x, relu, plus, spend)
        batch, inputs, height, width = x.shape
        if rows is None and columns is not None and folded.turns(x, inputs):
            return folded.run_turned(x, columns, relu, plus)
        outs = self.outs if rows is None else rows.size(0)
        if plus is not None and not (
            self.keeps_size and plus.shape == (batch, outs, height, width)
        ):
            out = self.run(x, rows, columns, False, None, False).add_(plus)
            return out.relu_() if relu else out
        _, lines, padded, bias = self._current()
        if rows is not None:
            bias = padded.index_select(0, rows)
        if folded.inputs_first:
            weight = lines if columns is None else lines.index_select(0, columns)
            if rows is not None:
                weight = weight.index_select(1, rows)
            elif weight.size(1) != outs:
                weight = weight[:, :outs]
        else:
            weight = lines if rows is None else lines.index_select(0, rows)
            if rows is None and lines.size(0) != outs:
                weight = weight[:outs]
            if columns is not None:
                weight = weight.reshape(outs * self.kernel, -1)
                weight = weight.gather(1, columns.expand(outs * self.kernel, -1))
        most = PRODUCT_POSITIONS if plus is None else SUM_POSITIONS
        if self.product and batch * height * width <= most:
            if not folded.inputs_first:
                weight = weight.t()
            return self._multiply(x, weight, bias, plus, relu, spend)
        if folded.inputs_first:
            full = weight.t()[:, :, None, None]
        else:
            high, wide = self.size
            line = self.kernel * inputs
            full = weight.as_strided((outs, inputs, high, wide), (line, 1, wide * inputs, inputs))
        if plus is None:
            return kernels.convolve(self.conv, x, full, bias, 1, relu)
        if spend and kernels.ACCUMULATES:
            return kernels.accumulate(self.conv, x, full, bias, 1, relu, plus)
        out = kernels.convolve(self.conv, x, full, bias, 1, False)
        return torch._add_relu_(out, plus) if relu else out.add_(plus)

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        plus: Optional[Tensor],
        relu: bool,
        spend: bool,
    ) -> Tensor:
        """A pointwise convolution as a product of matrices."""
        batch, inputs, height, width = x.shape
        positions, outs = batch * height * width, weight.size(1)
        pixels = x.as_strided((positions, inputs), (inputs, 1))
        if plus is None:
            out = pixels.mm(weight)
        else:
            start = plus.as_strided((positions, outs), (outs, 1))
            out = start.addmm_(pixels, weight) if spend else torch.addmm(start, pixels, weight)
        # The bias comes with the ReLU, in one pass over what was just written.
        out = torch._add_relu_(out, bias) if relu else out.add_(bias)
        image = height * width * outs
        return out.as_strided((batch, outs, height, width), (image, 1, width * outs, outs))


def quick_steps(entries: Mapping[str, Any]) -> dict[str, QuickConv]:
    """The convolutions of a block for :class:`QuickLayers`, none if it cannot run them all.

    Args:
        entries (Mapping): Convolution -> what the block's runner knows about it.
    """
    steps = {}
    for name, entry in entries.items():
        folded, gates = entry.folded, entry.gates
        if folded is None or entry.norm is not None or not QuickConv.fits(folded):
            return {}
        steps[name] = QuickConv(folded, gates.in_gate, gates.out_gate)
    return steps


class QuickLayers:
    """Runs the layers of a block on the open channels.

    Args:
        steps (dict[str, QuickConv]): Its convolutions.
        index (dict[str, Tensor]): Gate -> channels to compute; a gate that is not
            named computes all.
        x (Tensor): The block input.
        owns_input (bool): Whether nobody else needs that.
    """

    __slots__ = ('index', 'input', 'owns_input', 'steps')

    def __init__(
        self, steps: dict[str, QuickConv], index: dict[str, Tensor], x: Tensor, owns_input: bool
    ) -> None:
        self.steps = steps
        self.index = index
        self.input = x
        self.owns_input = owns_input

    def __call__(
        self,
        x: Tensor,
        conv: str,
        norm: Optional[str] = None,
        act: Any = None,
        gate: Optional[str] = None,
        plus: Optional[Tensor] = None,
    ) -> Tensor:
        step, get = self.steps[conv], self.index.get
        relu = type(act) is nn.ReLU
        spend = False
        if plus is not None:
            spend = self._is_spent(plus)
            if not plus.is_contiguous(memory_format=_LAST):
                plus, spend = plus.contiguous(memory_format=_LAST), True
        out = step.run(x, get(step.out_gate), get(step.in_gate), relu, plus, spend)
        if step.conv._forward_hooks:
            tell(step.conv, x, out)
        return out if relu or act is None else act(out)

    def _is_spent(self, plus: Tensor) -> bool:
        """Whether nobody needs a shortcut after this pass through the block."""
        if plus is self.input:
            return self.owns_input
        return plus.untyped_storage().data_ptr() != self.input.untyped_storage().data_ptr()
