# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What sites are worth before there is a gate: pure functions of layers, their MACs and sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn

from ..sites import Site
from .layer_recorder import LayerRecorder
from .switches import Side, switches_at


def layer_macs(network: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, int]:
    """Dense MACs of every layer that runs in a pass, those of gates left out.

    Args:
        network (nn.Module): The network, in the mode it is to be counted in.
        inputs: Its inputs.
        kwargs: Its named arguments.

    Returns:
        dict[str, int]: Name of the layer -> MACs, over all of its calls.
    """
    recorder = LayerRecorder(network)
    recorder.attach()
    try:
        with torch.no_grad():
            network(*inputs, **kwargs)
    finally:
        recorder.detach()
    found: Counter[str] = Counter()
    for call in recorder.calls:
        if not recorder.layers[call.layer][1]:
            found[call.layer] += call.macs
    return dict(found)


def share_left(
    sites: Iterable[Site], network: nn.Module, macs: Mapping[str, int], openness: float = 0.5
) -> float:
    """The part of a network's MACs that is left if every site is open to that degree.

    What gates cost themselves is not in it.

    Args:
        sites (Iterable[Site]): The sites.
        network (nn.Module): The network.
        macs (Mapping[str, int]): Layer -> its dense MACs.
        openness (float): The open part of each site's channels. Defaults to 0.5.

    Returns:
        float: 1 if there is no site.

    Example:
        >>> share_left(found.sites, net, layer_macs(net, torch.rand(1, 3, 224, 224)))
        0.43
    """
    switches = switches_at({site.name: site for site in sites}, network)
    total = sum(macs.values())
    if not total:
        return 1.0

    def side_left(side: Side) -> float:
        return sum(part * openness ** len(owners) for owners, part in side.parts().items())

    left = 0.0
    for layer, count in macs.items():
        switch = switches.get(layer)
        left += count * (side_left(switch.ins) * side_left(switch.outs) if switch else 1.0)
    return left / total


def share_touched(sites: Iterable[Site], network: nn.Module, macs: Mapping[str, int]) -> float:
    """The part of a network's MACs that is gone if all channels of the sites are closed.

    Args:
        sites (Iterable[Site]): The sites, or one of them.
        network (nn.Module): The network.
        macs (Mapping[str, int]): Layer -> its dense MACs.
    """
    return 1.0 - share_left(sites, network, macs, openness=0.0)
