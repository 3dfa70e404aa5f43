# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Runs a gated block on its open channels only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..macs import GatedConv, gated_convs
from ..nets import GatedBlock
from ..nets.block import Activation, Body
from ..runtime.module_hooks import is_watched, tell
from . import kernels
from .convolution import convolve, is_product
from .folding import FoldedLayer
from .forwards import WeightedForward, is_foldable, is_plain_conv, recording
from .gate_bundle import GateBundle
from .plan import ConvCost, Part, Planner
from .quick import QuickConv, QuickLayers, quick_steps
from .stamp import checks


def why_not(block: GatedBlock) -> Optional[str]:
    """Why a block cannot be run sparsely; None if it can."""
    sites = block.gate_sites()
    for name, conv in gated_convs(block, sites).items():
        module = block.get_submodule(name)
        if not isinstance(module, nn.Conv2d) or not is_plain_conv(module):
            return f'{name} is a {type(module).__name__}'
        if module.groups > 1 and not is_depthwise(module, conv):
            return f'{name} has groups={module.groups}'
    for site in sites:
        for name in site.norms or (site.norm,):
            module = block.get_submodule(name)
            if not is_foldable(module):
                return f'{name} is a {type(module).__name__} and cannot be folded'
    return None


def is_depthwise(conv: nn.Conv2d, gates: GatedConv) -> bool:
    """Whether each channel of a gated convolution is computed from itself."""
    one_each = conv.groups == conv.in_channels == conv.out_channels
    return one_each and conv.groups > 1 and gates.in_gate == gates.out_gate


@dataclass
class _Entry:
    """A convolution of a block as ``body`` asks for it.

    Attributes:
        conv (nn.Module): The convolution.
        gates (GatedConv): The gates of its two sides.
        folded (FoldedLayer, optional): Its prepared weights; None if it must
            be run as it is.
        norm (nn.Module, optional): The norm that is not folded in.
        cost (ConvCost, optional): What the planner knows about it; None if no
            gate switches it.
    """

    conv: nn.Module
    gates: GatedConv
    folded: Optional[FoldedLayer]
    norm: Optional[nn.Module]
    cost: Optional[ConvCost]


class SparseBlock:
    """The runner of one block, see :func:`~fgc_mm.inference.enable_sparse`.

    It keeps nothing of a pass, so several threads may run the same block.

    Args:
        block (GatedBlock): The block.
        channels_last (bool): Lay weights out for channels-last inputs.
            Defaults to True.
        granularity (int): See :class:`Planner`. Defaults to 1.
        way (str): See :class:`Planner`. Defaults to 'auto'.
    """

    def __init__(
        self,
        block: GatedBlock,
        channels_last: bool = True,
        granularity: int = 1,
        way: str = 'auto',
    ) -> None:
        self.block = block
        self.channels_last = channels_last
        self.owns_input = False  # whether nobody else needs the block input
        self.gated = gated_convs(block, block.gate_sites())
        self._padded, self._constant = self._pads()
        self._costs = {name: self._cost(name, gates) for name, gates in self.gated.items()}
        self.planner = Planner(list(self._costs.values()), granularity, way)
        self._entries: dict[str, _Entry] = {}
        self._steps: Optional[dict[str, QuickConv]] = None  # for the usual case
        gates = block.gates()
        self._bundle = GateBundle(gates) if gates and GateBundle.fits(gates, block) else None
        # What was prepared from parameters; convolutions join in as they are met.
        self.parts: list[Union[GateBundle, FoldedLayer]] = [self._bundle] if self._bundle else []
        # Whose mode matters: norms and gates decide otherwise in training.
        self._modes: list[nn.Module] = [block, *block.gates().values()]
        self._modes += [module for module in block.modules() if isinstance(module, _BatchNorm)]
        others = {part for gate in gates.values() for part in gate.modules()}
        layers = [module for module in block.modules() if module not in others]
        self._convs = [module for module in layers if is_plain_conv(module)]
        self._norms = [module for module in layers if is_foldable(module)]

    def attach(self) -> None:
        """Take over the block."""
        self.block.runner = self

    def detach(self) -> None:
        """Give it back."""
        for entry in self._entries.values():
            if isinstance(entry.conv.__dict__.get('forward'), WeightedForward):
                del entry.conv.__dict__['forward']
        self._entries = {}
        self._steps = None
        self.parts = [self._bundle] if self._bundle else []
        self.block.runner = None

    def applies(self, x: Tensor) -> bool:
        """In evaluation, where nobody records the operations."""
        if checks.done:
            return x.numel() > 0
        if recording() or x.dim() != 4 or x.numel() == 0 or self.trains():
            return False
        # Norms are not called, so someone who watches one needs masked execution.
        return not any(map(is_watched, self._norms)) and self._fit()

    def trains(self) -> bool:
        """Whether something in the block is in training mode."""
        return any(module.training for module in self._modes)

    def fits(self) -> bool:
        """Whether modules are still such as were prepared: not patched, pruned and so on."""
        return self._fit() and (
            self._bundle is None or GateBundle.fits(self._bundle.gates, self.block)
        )

    def _fit(self) -> bool:
        """:meth:`fits`, but for the gates."""
        return all(map(is_plain_conv, self._convs)) and all(map(is_foldable, self._norms))

    def run(self, body: Body, x: Tensor) -> Tensor:
        """Run the block on a batch.

        Args:
            body (Callable): ``body(x, layer)`` of the block.
            x (Tensor): The block input.
        """
        bundle = self._bundle
        if bundle is None or (not checks.done and bundle.watched(self.block)):
            values = _to_numpy(self.block.decide(x))
        else:
            values = bundle.decide(x)
        if not values:
            return body(x, _Layers(self, Part(), {}, x))
        parts = self.planner.plan(values, x.size(2) * x.size(3))
        if self._steps and parts[0].exact and checks.done and kernels.fits(x):
            index = {gate: torch.from_numpy(own) for gate, own in parts[0].channels.items()}
            if all(map(len, index.values())):
                return body(x, QuickLayers(self._steps, index, x, self.owns_input))
        outs = []
        for part in parts:
            images = x if part.images is None else _take(x, part.images)
            factors = {} if part.exact else _factors(part, values, x)
            outs.append(body(images, _Layers(self, part, factors, images)))
        if self._steps is None:
            self._steps = quick_steps(self._entries) if self.planner.granularity == 1 else {}
        if len(outs) == 1:
            return outs[0]
        order = [image for part in parts for image in part.images or ()]
        out = torch.cat(outs)
        if order == sorted(order):
            return out
        return out[torch.from_numpy(np.argsort(order)).to(out.device)]

    def entry(self, conv: str, norm: Optional[str]) -> _Entry:
        """A convolution of the block and its prepared weights."""
        entry = self._entries.get(conv)
        if entry is None:
            module = self.block.get_submodule(conv)
            after = None if norm is None else self.block.get_submodule(norm)
            gates = self.gated.get(conv, GatedConv())
            cost = self._costs.get(conv)
            entry = _Entry(module, gates, None, after, cost)
            if isinstance(module, nn.Conv2d) and is_plain_conv(module):
                folds = after is not None and is_foldable(after)
                folded = FoldedLayer(
                    module,
                    after if folds else None,
                    self.channels_last,
                    inputs_first=gates.in_gate is not None,
                    pads=(gates.out_gate in self._padded, gates.in_gate in self._padded)
                    if module.groups == 1
                    else (gates.out_gate in self._padded, False),
                )
                entry = _Entry(module, gates, folded, None if folds else after, cost)
                self.parts.append(folded)
                module.forward = WeightedForward(module)  # type: ignore[method-assign,assignment]
            self._entries[conv] = entry
        return entry

    def index(self, gate: str, channels: np.ndarray, relu: bool) -> tuple[np.ndarray, bool]:
        """Gathered channels of a gate with their padding, see :class:`FoldedLayer`.

        Args:
            gate (str): The gate.
            channels (np.ndarray): The channels.
            relu (bool): Whether nothing but a ReLU comes between the convolutions.

        Returns:
            tuple: The channels to take, and whether the bias of the convolution
            that reads them is among them.
        """
        more = self.planner.padded(len(channels)) - len(channels)
        if not more or gate not in self._padded:
            return channels, False
        width = self.block.gates()[gate].channels
        pads = np.full(more, width + 1, channels.dtype)
        constant = relu and gate in self._constant
        if constant:
            pads[0] = width
        return np.concatenate((channels, pads)), constant

    def _pads(self) -> tuple[set[str], set[str]]:
        """The gates whose channels can be padded, and those among them whose
        padding can hold the bias of the next convolution."""
        padded, constant = set(), set()
        for site in self.block.gate_sites():
            makers = [self.block.get_submodule(name) for name in site.produces]
            readers = [self.block.get_submodule(name) for name in site.consumes]
            # A depthwise one that comes first has just the channels of the block input.
            if any(conv.groups == 1 for conv in makers):
                padded.add(site.gate)
                if len(makers) == len(readers) == 1 and is_product(readers[0]):
                    constant.add(site.gate)
        return padded, constant

    def _cost(self, name: str, gates: GatedConv) -> ConvCost:
        conv = self.block.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        return ConvCost(
            conv.in_channels // conv.groups,
            conv.out_channels,
            conv.kernel_size[0] * conv.kernel_size[1],
            in_gate=gates.in_gate,
            out_gate=gates.out_gate,
            depthwise=is_depthwise(conv, gates),
        )


class _Layers:
    """Runs the layers of a block for one part of a batch."""

    def __init__(
        self, runner: SparseBlock, part: Part, factors: dict[str, Tensor], x: Tensor
    ) -> None:
        self.runner = runner
        self.factors = factors
        self.input = x
        # A part of a batch may be a view of what other parts read.
        self.owns_input = runner.owns_input and part.images is None
        self.positions = x.size(2) * x.size(3)
        self.chosen = part.channels
        self.channels: dict[str, Tensor] = {}
        self.constant: set[str] = set()

    def __call__(
        self,
        x: Tensor,
        conv: str,
        norm: Optional[str] = None,
        act: Optional[Activation] = None,
        gate: Optional[str] = None,
        plus: Optional[Tensor] = None,
    ) -> Tensor:
        entry = self.runner.entry(conv, norm)
        relu = (
            type(act) is nn.ReLU
            and not (act._forward_hooks or act._forward_pre_hooks)
            and 'forward' not in act.__dict__
        )
        made = entry.gates.out_gate
        if made in self.chosen and made not in self.channels:
            self._choose(made, relu, x.device)
        if entry.folded is not None and entry.norm is None:
            out = self._convolve(x, entry, plus, relu)
            plus, act = None, None if relu else act
        else:
            out = entry.conv(x) if entry.folded is None else self._convolve(x, entry)
        if entry.cost is not None:
            # Learn how much smaller the output is than the block input.
            entry.cost.scale = out.size(2) * out.size(3) / self.positions
        if entry.norm is not None:
            out = entry.norm(out)
        if plus is not None:
            out += plus
        if act is not None:
            out = out.relu_() if relu else act(out)
        if gate in self.factors:
            # What a module returned may be known to others, a fresh convolution is not.
            factor = self.factors[gate].to(out.dtype)
            out = (
                out * factor if entry.folded is None or entry.norm is not None else out.mul_(factor)
            )
        return out

    def _convolve(
        self, x: Tensor, entry: _Entry, plus: Optional[Tensor] = None, relu: bool = False
    ) -> Tensor:
        assert entry.folded is not None
        rows = self.channels.get(entry.gates.out_gate or '')
        columns = self.channels.get(entry.gates.in_gate or '')
        conv = entry.folded.conv
        spend = plus is not None and checks.done and self._is_spent(plus)
        if checks.done and rows is None and columns is None:
            out = entry.folded.run(x, relu, plus, spend)
            tell(conv, x, out)
            return out
        if (
            checks.done
            and rows is None
            and columns is not None
            and entry.folded.turns(x, columns.numel())
        ):
            out = entry.folded.run_turned(x, columns, relu, plus)
            tell(conv, x, out)
            return out
        groups: int = conv.groups
        if groups > 1 and rows is not None:
            columns, groups = None, len(rows)
            if x.size(1) != groups:  # the block input itself
                x = x.index_select(1, rows)
        weight: Tensor
        bias: Optional[Tensor]
        weight, bias = entry.folded.weights(rows, columns)
        if entry.gates.in_gate in self.constant:
            bias = None
        if not checks.done and (conv._forward_hooks or conv._forward_pre_hooks):
            # Hooks may keep what they see.
            out = conv(x, weight, bias, groups, plus)
            return out.relu() if relu else out.clone()
        out = convolve(conv, x, weight, bias, groups, plus, relu, spend)
        tell(conv, x, out)
        return out

    def _choose(self, gate: str, relu: bool, device: torch.device) -> None:
        """Fix which channels of a gate are computed."""
        index, constant = self.runner.index(gate, self.chosen[gate], relu)
        self.channels[gate] = torch.from_numpy(index).to(device)
        if constant:
            self.constant.add(gate)
        if gate in self.factors:
            more = len(index) - self.factors[gate].size(1)
            self.factors[gate] = F.pad(self.factors[gate], (0, 0, 0, 0, 0, more), value=1.0)

    def _is_spent(self, plus: Tensor) -> bool:
        """Whether nobody needs a shortcut after this pass through the block."""
        if plus is self.input:
            return self.owns_input
        return plus.untyped_storage().data_ptr() != self.input.untyped_storage().data_ptr()


def _to_numpy(multipliers: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """All decisions of a block on the CPU, in one transfer."""
    tensors = list(multipliers.values())
    if not tensors or tensors[0].device.type == 'cpu':
        arrays = [tensor.float().numpy() for tensor in tensors]
    else:
        both = torch.cat([tensor.float() for tensor in tensors], dim=1).cpu().numpy()
        cuts = np.cumsum([tensor.size(1) for tensor in tensors])[:-1]
        arrays = np.split(both, cuts, axis=1)
    return dict(zip(multipliers, arrays, strict=True))


def _take(x: Tensor, images: list[int]) -> Tensor:
    if images == list(range(images[0], images[-1] + 1)):
        return x[images[0] : images[-1] + 1]
    return x[torch.tensor(images, device=x.device)]


def _factors(part: Part, values: dict[str, np.ndarray], x: Tensor) -> dict[str, Tensor]:
    """What the computed channels are multiplied with, where it is not 1."""
    factors = {}
    for gate, value in values.items():
        if part.images is not None:
            value = value[part.images]
        if gate in part.channels:
            value = value[:, part.channels[gate]]
        if not (value == 1).all():
            factors[gate] = torch.from_numpy(value.astype(np.float32)[:, :, None, None]).to(x)
    return factors
