# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One call from a network to a gated network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Optional, Union

import torch.nn as nn

from ..errors import UsageError, in_context
from .choose import Choice, choose
from .container import NAME, Gates
from .find import Example, find_sites
from .finder import Found
from .forward_hooks import gate_sites
from .narrow import Kept, narrow
from .origin import Gating, outline

DEFAULT_GATE = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'))


def gate(
    network: nn.Module,
    example: Example,
    gate: Optional[dict] = None,
    sites: Choice = 'all',
    follow_freeze: bool = False,
    convs: Optional[Sequence[str]] = None,
    key: str = 'sites',
    within_blocks: bool = False,
    widths: Optional[Mapping[str, Kept]] = None,
) -> nn.Module:
    """Gate a network: any network, as it is.

    Its sites are found by running it on the example, and gates are put on them. Names, weights
    and code of the network stay; its new child ``gates`` holds the gates.

    Args:
        network (nn.Module): The network; it is changed and returned.
        example (Tensor | Sequence | Mapping): What to call it with, such as
            ``torch.rand(1, 3, 224, 224)``.
        gate (dict, optional): Config of the gates. Defaults to None,
            ``dict(type='BinConcreteGate', norm_cfg=dict(type='LN'))``.
        sites (str | int | Sequence): Which sites, see :func:`~fgc_mm.sites.choose.choose`.
            Defaults to 'all', which leaves the stem out.
        follow_freeze (bool): Gates of layers that do not learn do not either, and the network may
            put the gates' norms into evaluation. Defaults to False.
        convs (Sequence[str], optional): Of these sites only those of layers called so, such as
            ``['conv2']``. Defaults to None.
        key (str): What ``sites`` is called for the user. Defaults to 'sites'.
        within_blocks (bool): Leave what one block hands to the next to itself, unless its site is
            named. Defaults to False.
        widths (Mapping, optional): Site -> the number of channels that are left of it, or their
            numbers. Defaults to None, all of all.

    Returns:
        nn.Module: The network.

    Raises:
        UsageError: If it cannot be run on the example, or has no site.

    Example:
        >>> net = gate(torchvision.models.resnet50(), torch.rand(1, 3, 224, 224))
        >>> len(find_gates(net))
        32
    """
    found = find_sites(network, example)
    if not found.sites:
        reasons = '; '.join(f'{r.name}: {r.reason}' for r in found.refused[:3])
        raise UsageError(
            f'{type(network).__name__} has no site to put a gate on'
            + (f' ({reasons})' if reasons else ': it has no convolution and no linear layer')
        )
    found = narrow_found(network, found, widths or {}, example)
    gate_sites(
        network,
        choose(found.sites, sites, stem_of(network, found), convs, key, within_blocks),
        gate or DEFAULT_GATE,
        follow_freeze,
    )
    remember(network, outline(example), widths or {}, dict(gate or DEFAULT_GATE))
    return network


def remember(
    network: nn.Module, example: Any, widths: Mapping[str, Kept], gate: Optional[dict] = None
) -> None:
    """Keep with a network how it got its gates and widths, for files.

    Args:
        network (nn.Module): The network.
        example: Outline of what it can be called with, or where its sites were found.
        widths (Mapping): Site -> what is left of it.
        gate (dict, optional): Config of its gates. Defaults to None, it has none.
    """
    gates: Optional[Gates] = getattr(network, NAME) if gate is not None else None
    if gates is not None:
        gates.example = example
    network.gating = Gating(  # type: ignore[assignment]
        copy.deepcopy(gate),
        list(gates.sites) if gates else [],
        {site: kept if isinstance(kept, int) else len(kept) for site, kept in widths.items()},
        gates is not None and gates.follow_norm_eval,
        example,
    )


def narrowed(network: nn.Module, widths: Mapping[str, Kept], example: Example) -> nn.Module:
    """Take channels of sites out of a network that has no gates.

    Args:
        network (nn.Module): The network; it is changed and returned.
        widths (Mapping): Site -> the number of channels that are left of it, or their numbers.
        example (Tensor | Sequence | Mapping): What to call it with.

    Raises:
        UsageError: If a site is none, or cannot be narrowed.
    """
    narrow_found(network, find_sites(network, example), widths, example)
    remember(network, outline(example), widths)
    return network


def narrow_found(
    network: nn.Module,
    found: Found,
    widths: Mapping[str, Kept],
    example: Union[Example, Callable[[nn.Module], Found]],
) -> Found:
    """Take channels of the sites that were found out of a network.

    Args:
        network (nn.Module): The network; it is changed.
        found (Found): What was found in it.
        widths (Mapping): See :func:`narrowed`.
        example (Tensor | Sequence | Mapping | Callable): See :func:`~fgc_mm.sites.narrow.narrow`.

    Returns:
        Found: What is there now.
    """
    if not widths:
        return found
    with in_context('widths'):
        sites, refused = narrow(network, found.sites, widths, example)
    for name, reason in refused.items():
        raise UsageError(f'widths[{name!r}]={widths[name]!r} cannot be: {reason}')
    return replace(found, sites=sites)


def stem_of(network: nn.Module, found: Found) -> list[str]:
    """The sites in front of the blocks: the layer that reads the picture, and what stands beside it
    in the same part of the network, unless that part is the network's body."""
    order = [*(site.name for site in found.sites), *(r.name for r in found.refused)]
    first = found.first
    part = first.partition('.')[0]
    beside = [name for name in order if name.partition('.')[0] == part]
    if len(beside) > max(3, len(order) // 4):
        beside = [first]
    return [site.name for site in found.sites if site.name in beside]
