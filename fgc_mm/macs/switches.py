# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which gates switch which side of which layer of a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Optional

import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from ..gates import find_gates
from ..sites import End, Gates
from .layers import is_counted


@dataclass
class Side:
    """The inputs or outputs of a layer and the gates they follow.

    Attributes:
        channels (int): How many channels there are.
        ends (list): (name of the gate, :class:`~fgc_mm.sites.End`); a channel that follows two
            is open if both say so.
    """

    channels: int
    ends: list[tuple[str, End]] = field(default_factory=list)

    def mask(self, masks: dict[str, Tensor]) -> Optional[Tensor]:
        """B x channels, None if no gate is there.

        Args:
            masks (dict): Gate -> B x decisions.
        """
        found: Optional[Tensor] = None
        for gate, end in self.ends:
            mask = end.spread(masks[gate])
            found = mask if found is None else found * mask
        return found

    def parts(self) -> dict[tuple[str, ...], float]:
        """The gates that a channel follows -> the part of all channels that follow just those."""
        owners: list[tuple[str, ...]] = [()] * self.channels
        for gate, end in self.ends:
            index = range(self.channels) if end.index is None else end.index
            owners = [
                (*have, gate) if i >= 0 else have for have, i in zip(owners, index, strict=True)
            ]
        return {owner: count / self.channels for owner, count in Counter(owners).items()}


@dataclass
class Switch:
    """Both sides of a layer; a layer between producer and consumer counts by its outputs."""

    ins: Side
    outs: Side


def switches_of(model: nn.Module) -> dict[str, Switch]:
    """The layers of a model that gates switch.

    Args:
        model (nn.Module): Any model, with gates attached to sites of it or of its parts.

    Returns:
        dict[str, Switch]: Name of the layer -> its gates.

    Raises:
        UsageError: If a gate belongs to no site, so that nobody knows what it spares.
    """
    modules = dict(model.named_modules())
    found: dict[str, Switch] = {}
    holders = set()

    def switch(layer: str) -> Switch:
        if layer not in found:
            ins, outs = widths(modules[layer])
            found[layer] = Switch(Side(ins), Side(outs))
        return found[layer]

    for name, module in modules.items():
        if not isinstance(module, Gates):
            continue
        holders.add(name)
        network = name.rpartition('.')[0]
        for site in module.sites.values():
            gate = full_name(name, module.name_of(site.name))
            for end in (*site.producers, *site.through):
                switch(full_name(network, end.module)).outs.ends.append((gate, end))
            for end in site.consumers:
                switch(full_name(network, end.module)).ins.ends.append((gate, end))
    for name in find_gates(model):
        if name.rpartition('.')[0] not in holders:
            raise UsageError(
                f'gate {name!r} of {type(model).__name__} is on no site, so the MACs it spares are '
                'unknown; put gates on a network by fgc_mm.gate'
            )
    return found


def full_name(prefix: str, name: str) -> str:
    """Name of a submodule, seen from the model."""
    return f'{prefix}.{name}' if prefix else name


def widths(layer: Any) -> tuple[int, int]:
    """Input and output channels of a layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def kinds_of(model: nn.Module, backbone: str) -> dict[str, tuple[bool, bool]]:
    """The layers that count: name -> whether it is in the backbone, whether it is a gate's own.

    Args:
        model (nn.Module): Any model.
        backbone (str): Name of the part that is the backbone; '' means the whole model.

    Raises:
        UsageError: If there is no such part.
    """
    modules = dict(model.named_modules())
    if backbone not in modules:
        parts = ', '.join(repr(name) for name, _ in model.named_children())
        raise UsageError(
            f'backbone={backbone!r} is no part of {type(model).__name__}; name one of its '
            f"parts ({parts}), or '' for all of it"
        )
    inside = {id(module) for module in modules[backbone].modules()}
    own = {id(m) for gate in find_gates(model).values() for m in gate.modules()}
    return {
        name: (id(module) in inside, id(module) in own)
        for name, module in modules.items()
        if is_counted(module)
    }
