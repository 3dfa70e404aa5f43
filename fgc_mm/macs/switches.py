# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which gates switch which side of which layer of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from ..gates import find_gates
from ..sites import End, Gates, Site


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
    holders = {name: m for name, m in model.named_modules() if isinstance(m, Gates)}
    for name in find_gates(model):
        if name.rpartition('.')[0] not in holders:
            raise UsageError(
                f'gate {name!r} of {type(model).__name__} is on no site, so the MACs it spares are '
                'unknown; put gates on a network by fgc_mm.gate'
            )
    placed = {
        f'{name}.{gates.name_of(site.name)}': site.seen_from(name.rpartition('.')[0])
        for name, gates in holders.items()
        for site in gates.sites.values()
    }
    return switches_at(placed, model)


def switches_at(sites: Mapping[str, Site], network: nn.Module) -> dict[str, Switch]:
    """The layers that gates on sites switch, or would.

    Args:
        sites (Mapping[str, Site]): What each site goes by -> the site.
        network (nn.Module): The network they are in.
    """
    modules = dict(network.named_modules())
    found: dict[str, Switch] = {}

    def switch(layer: str) -> Switch:
        if layer not in found:
            found[layer] = Switch(*map(Side, widths(modules[layer])))
        return found[layer]

    for name, site in sites.items():
        for end in (*site.producers, *site.through):
            switch(end.module).outs.ends.append((name, end))
        for end in site.consumers:
            switch(end.module).ins.ends.append((name, end))
    return found


def widths(layer: Any) -> tuple[int, int]:
    """Input and output channels of a layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels
