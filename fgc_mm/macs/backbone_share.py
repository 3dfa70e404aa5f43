# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The executed share of a backbone's MACs as a function of its gates."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from ..gates import find_gates
from ..runtime import Attachments
from .gated_convs import GatedConv, block_sites, gated_convs
from .layers import call_macs, is_counted


class BackboneShare:
    """Watches the layers of a backbone and prices decisions of its gates.

    It counts as :class:`MACsTracer` does: gated convolutions by their open
    channels, everything else fully, the gates' own MACs on top, over the MACs of
    the same backbone without gates. In place of the masks of a pass it takes any
    openness, such as probabilities, and is differentiable in them. As decisions of two
    gates are independent given the image, probabilities give the expected share.

    Args:
        model (nn.Module): A model with gates.
        backbone (str): Name of the part that is the backbone; '' means the
            whole model. Defaults to 'backbone'.

    Example:
        >>> share = BackboneShare(detector)
        >>> share.attach()
        >>> detector(images)
        >>> probs = [gate.record.probs.mean(dim=1) for gate in share.gates.values()]
        >>> share.of(torch.stack(probs, dim=1))
        tensor([0.71, 0.64])
    """

    def __init__(self, model: nn.Module, backbone: str = 'backbone') -> None:
        self._modules = dict(model.named_modules())
        if backbone not in self._modules:
            parts = ', '.join(repr(name) for name, _ in model.named_children())
            raise UsageError(
                f'backbone={backbone!r} is no part of {type(model).__name__}; name one of its '
                f"parts ({parts}), or '' for all of it"
            )
        self.backbone = self._modules[backbone]
        inside = {id(module) for module in self.backbone.modules()}
        self.gates = {name: gate for name, gate in find_gates(model).items() if id(gate) in inside}
        gate_layers = {id(m) for gate in self.gates.values() for m in gate.modules()}
        self._plans: dict[str, GatedConv] = {}
        for block, sites in block_sites(model).items():
            self._plans.update(gated_convs(self._modules[block], sites, block))
        self._plain: list[str] = []
        self._overhead: list[str] = []
        self._gated: list[str] = []
        for name, module in self._modules.items():
            if id(module) not in inside or not is_counted(module):
                continue
            if name in self._plans:
                self._gated.append(name)
                self._check_grouped(name)
            elif id(module) in gate_layers:
                self._overhead.append(name)
            else:
                self._plain.append(name)
        self._sides = {name: self._columns(self._plans[name]) for name in self._gated}
        self._macs: dict[str, float] = {}
        self._attached = Attachments()

    def attach(self) -> None:
        """Start watching."""
        self._attached.before(self.backbone, lambda *_: self._macs.clear())
        for name in (*self._plain, *self._overhead, *self._gated):
            self._attached.after(self._modules[name], partial(self._on_layer, name))

    def detach(self) -> None:
        """Stop watching."""
        self._attached.remove()

    def of(self, openness: Tensor) -> Tensor:
        """The share of each image, at the image size of the last pass.

        Args:
            openness (Tensor): B x gates, for each image and gate, in the order
                of ``self.gates``, the mean openness of its channels. Gates that did
                not run may have any.

        Returns:
            Tensor: One share for each image; above 1 by the gates' own MACs if
            all is open.
        """
        dense = self.dense()
        ran = [name for name in self._gated if name in self._macs]
        macs = openness.new_tensor([self._macs[name] / dense for name in ran])
        # A side without a gate is a column of ones behind the others.
        open_ = torch.cat([openness, torch.ones_like(openness[:, :1])], dim=1)
        ins, outs = map(list, zip(*(self._sides[name] for name in ran), strict=True))
        fixed = (self._sum(self._plain) + self._sum(self._overhead)) / dense
        return fixed + (open_[:, ins] * open_[:, outs]) @ macs

    def dense(self) -> float:
        """MACs of the last pass, for one image, of the backbone without gates."""
        dense = self._sum(self._plain) + self._sum(self._gated)
        if not dense:
            raise RuntimeError('the backbone has not run; run the model once after attach()')
        return dense

    def minimum(self, openness: float = 0.0) -> float:
        """The share with that part of each gate's channels open, by default none:
        what stem, shortcuts and the gates themselves cost.

        Args:
            openness (float): Open part of each gate. Defaults to 0.0.
        """
        return float(self.of(torch.full((1, len(self.gates)), openness)))

    def _sum(self, names: list[str]) -> float:
        return sum(self._macs.get(name, 0.0) for name in names)

    def _columns(self, plan: GatedConv) -> tuple[int, int]:
        """Where the openness of a convolution's inputs and outputs stands."""
        order = list(self.gates)
        ins, outs = (
            len(order) if gate is None else order.index(gate)
            for gate in (plan.in_gate, plan.out_gate)
        )
        # A depthwise convolution has one gate on both sides and counts it once.
        return (len(order), outs) if ins == outs else (ins, outs)

    def _check_grouped(self, name: str) -> None:
        conv, plan = self._modules[name], self._plans[name]
        groups: Any = getattr(conv, 'groups', 1)
        both = plan.in_gate is not None and plan.out_gate is not None
        depthwise = plan.in_gate == plan.out_gate and groups == conv.in_channels
        if both and groups > 1 and not depthwise:
            raise UsageError(
                f'{name!r} has {groups} groups and gates on both sides: its MACs depend on which '
                'channels meet in a group, not on how many are open'
            )

    def _on_layer(self, name: str, layer: nn.Module, args: tuple, output: Tensor) -> None:
        # Set, not added: a checkpointed layer runs again in the backward pass.
        self._macs[name] = call_macs(layer, args, output) / output.size(0)
