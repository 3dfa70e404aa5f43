# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How a gated block is run while it is recorded for export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ..macs import GatedConv, gated_convs
from ..nets import GatedBlock
from ..nets.block import Activation, Body
from .folding import FoldedLayer
from .forwards import is_depthwise, is_foldable, why_not

FORMS = ('masked', 'gathered')


@contextmanager
def recordable(model: nn.Module, form: str = 'masked') -> Iterator[dict[str, Tensor]]:
    """Have a model compute with operations that an exported graph can hold.

    Gated blocks run in the given form and leave no records, and adaptive
    average pooling is written as a product of matrices, which needs no fixed
    image size. Afterward the model is as before.

    Args:
        model (nn.Module): A model with gates.
        form (str): 'masked' multiplies closed channels by zero, for any batch;
            'gathered' convolves with the weights of the open channels, for
            single images. Defaults to 'masked'.

    Yields:
        dict[str, Tensor]: Name of each gate -> B x C, its mask in the last
        pass, in network order.
    """
    masks: dict[str, Tensor] = {}
    blocks = {name: m for name, m in model.named_modules() if isinstance(m, GatedBlock)}
    pools = [m for m in model.modules() if type(m) is nn.AdaptiveAvgPool2d and _splits(m)]
    before = [block.runner for block in blocks.values()]
    try:
        for name, block in blocks.items():
            gathered = form == 'gathered' and why_not(block) is None
            runner = GatheredBlock if gathered else MaskedBlock
            block.runner = runner(block, f'{name}.' if name else '', masks)
        for pool in pools:
            pool.forward = MatrixPool(pool)  # type: ignore[method-assign,assignment]
        yield masks
    finally:
        for block, runner_before in zip(blocks.values(), before, strict=True):
            block.runner = runner_before
        for pool in pools:
            pool.__dict__.pop('forward', None)


def masked_blocks(model: nn.Module) -> dict[str, str]:
    """Gated blocks that stay masked in the gathered form, and why."""
    reasons = {
        name: why_not(m)
        for name, m in model.named_modules()
        if isinstance(m, GatedBlock) and m.gates()
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


class MaskedBlock:
    """The runner of a block whose closed channels are multiplied by zero.

    Args:
        block (GatedBlock): The block.
        prefix (str): What its gates' names begin with.
        masks (dict): Where their masks go.
    """

    def __init__(self, block: GatedBlock, prefix: str, masks: dict[str, Tensor]) -> None:
        self.block = block
        self.prefix = prefix
        self.masks = masks

    def applies(self, x: Tensor) -> bool:
        """Always."""
        return True

    def run(self, body: Body, x: Tensor) -> Tensor:
        """Decide, and run the block under the masks.

        Args:
            body (Callable): ``body(x, layer)`` of the block.
            x (Tensor): The block input.
        """
        multipliers: dict[str, Tensor] = {}
        gates = self.block.gates()
        pooled = next(iter(gates.values())).pool(x) if gates else None
        for name, gate in gates.items():
            multipliers[name], record = gate.decision(pooled)  # type: ignore[arg-type]
            self.masks[self.prefix + name] = record.mask
        return body(x, self._layer(multipliers))

    def _layer(self, multipliers: dict[str, Tensor]) -> Callable[..., Tensor]:
        return _MaskedLayer(self.block, multipliers)


class GatheredBlock(MaskedBlock):
    """The runner of a block that convolves with the weights of open channels.

    The weights are gathered inside the graph. They are prepared in the first
    pass, which therefore must not be recorded: batch norm is folded in, and a
    channel of zeros added on each gated side. That one is taken where all
    others are closed, so that no runtime has to convolve with none. It takes
    single images.
    """

    def __init__(self, block: GatedBlock, prefix: str, masks: dict[str, Tensor]) -> None:
        super().__init__(block, prefix, masks)
        self.gated = gated_convs(block, block.gate_sites())
        self._prepared: dict[str, tuple[Tensor, Tensor]] = {}

    def weights(self, conv: str, norm: Optional[nn.Module]) -> tuple[Tensor, Tensor]:
        """Weight and bias of a gated convolution and its norm as one."""
        if conv not in self._prepared:
            module: Any = self.block.get_submodule(conv)
            weight, bias = FoldedLayer(module, norm).weights()
            gates = self.gated[conv]
            if not is_depthwise(module, gates):
                rows, columns = (int(g is not None) for g in (gates.out_gate, gates.in_gate))
                weight = F.pad(weight, (0, 0, 0, 0, 0, columns, 0, rows))
                bias = F.pad(bias, (0, rows))
            if gates.out_gate is None and module.kernel_size == (1, 1):
                # Inputs first: copies of whole rows are many times as fast as of
                # single values.
                weight = weight[:, :, 0, 0].t().contiguous()
            self._prepared[conv] = weight, bias
        return self._prepared[conv]

    def _layer(self, multipliers: dict[str, Tensor]) -> Callable[..., Tensor]:
        return _GatheredLayer(self, {name: m[0] for name, m in multipliers.items()})


class _MaskedLayer:
    """Runs the layers of a block and multiplies."""

    def __init__(self, block: GatedBlock, multipliers: dict[str, Tensor]) -> None:
        self.block = block
        self.multipliers = multipliers

    def __call__(
        self,
        x: Tensor,
        conv: str,
        norm: Optional[str] = None,
        act: Optional[Activation] = None,
        gate: Optional[str] = None,
        plus: Optional[Tensor] = None,
    ) -> Tensor:
        out = self.block.get_submodule(conv)(x)
        if norm is not None:
            out = self.block.get_submodule(norm)(out)
        if plus is not None:
            out = out + plus
        if act is not None:
            out = act(out)
        if gate in self.multipliers:
            out = out * self.multipliers[gate][:, :, None, None]
        return out


class _GatheredLayer(_MaskedLayer):
    """Runs the layers of a block on the open channels of one image."""

    def __init__(self, runner: GatheredBlock, multipliers: dict[str, Tensor]) -> None:
        super().__init__(runner.block, multipliers)
        self.runner = runner
        self.is_open = {name: (m != 0).to(m.dtype) for name, m in multipliers.items()}
        self.channels = {name: _channels(mask) for name, mask in self.is_open.items()}

    def __call__(
        self,
        x: Tensor,
        conv: str,
        norm: Optional[str] = None,
        act: Optional[Activation] = None,
        gate: Optional[str] = None,
        plus: Optional[Tensor] = None,
    ) -> Tensor:
        gates = self.runner.gated.get(conv)
        if gates is None:
            return super().__call__(x, conv, norm, act, plus=plus)
        module: Any = self.block.get_submodule(conv)
        after = None if norm is None else self.block.get_submodule(norm)
        folds = after is not None and is_foldable(after)
        weight, bias = self.runner.weights(conv, after if folds else None)
        run = self._depthwise if is_depthwise(module, gates) else self._gather
        out = run(x, module, gates, weight, bias)
        if after is not None and not folds:
            out = after(out)
        if plus is not None:
            out = out + plus
        if act is not None:
            out = act(out)
        if gate in self.multipliers and not self.block.gates()[gate].hard:
            factors = F.pad(self.multipliers[gate], (0, 1))
            out = out * factors.index_select(0, self.channels[gate])[:, None, None]
        return out

    def _gather(
        self, x: Tensor, conv: nn.Conv2d, gates: GatedConv, weight: Tensor, bias: Tensor
    ) -> Tensor:
        if gates.out_gate is not None:
            rows = self.channels[gates.out_gate]
            weight, bias = weight.index_select(0, rows), bias.index_select(0, rows)
        if gates.in_gate is not None:
            columns = self.channels[gates.in_gate]
            if weight.dim() == 2:
                weight = weight.index_select(0, columns).t()[:, :, None, None]
            else:
                weight = weight.index_select(1, columns)
        return F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation)

    def _depthwise(
        self, x: Tensor, conv: nn.Conv2d, gates: GatedConv, weight: Tensor, bias: Tensor
    ) -> Tensor:
        # The number of groups is fixed in a graph: all channels are convolved,
        # and the open ones taken from the result.
        assert gates.in_gate is not None
        others = [g for g in self.runner.gated.values() if g is not gates]
        if any(other.out_gate == gates.in_gate for other in others):  # comes gathered
            # Each channel in its place; what stands in a closed one's is dropped.
            place = self.is_open[gates.in_gate].cumsum(dim=0) - 1
            x = x.index_select(1, place.clamp(min=0).long())
        out = F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)
        out = F.pad(out, (0, 0, 0, 0, 0, 1))
        return out.index_select(1, self.channels[gates.in_gate])


def _channels(is_open: Tensor) -> Tensor:
    """Numbers of the open channels; that of the added one if all are closed."""
    none = 1 - is_open.max(dim=0, keepdim=True).values
    return torch.cat([is_open, none]).nonzero().flatten()


def _splits(pool: nn.AdaptiveAvgPool2d) -> bool:
    """Whether a pooling gives more than the mean of the whole map."""
    size = pool.output_size
    return any(side not in (1, None) for side in (size if isinstance(size, tuple) else (size,)))


class MatrixPool:
    """``forward`` of adaptive average pooling, for image sizes not known yet.

    A cell is the mean of rows ``floor(i H / n)`` to ``ceil((i + 1) H / n)``, and
    of columns alike; both means are products with a matrix.

    Args:
        pool (nn.AdaptiveAvgPool2d): The module.
    """

    def __init__(self, pool: nn.AdaptiveAvgPool2d) -> None:
        size = pool.output_size
        self.height, self.width = size if isinstance(size, tuple) else (size, size)

    def __call__(self, x: Tensor) -> Tensor:
        if self.width is not None:
            x = x @ _means(x, 3, self.width).transpose(0, 1)
        return x if self.height is None else _means(x, 2, self.height) @ x


def _means(x: Tensor, dim: int, cells: int) -> Tensor:
    """cells x length, rows that take the mean of a cell."""
    length = x.shape[dim]
    cell = torch.arange(cells, device=x.device)[:, None]
    place = torch.arange(length, device=x.device)[None]
    # floor and ceil of quotients, in whole numbers
    begin = cell * length // cells
    end = ((cell + 1) * length + cells - 1) // cells
    inside = ((place >= begin) & (place < end)).to(x.dtype)
    return inside / inside.sum(dim=1, keepdim=True)
