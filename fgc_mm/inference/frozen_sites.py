# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The sites of a model: which belong together, and what is around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch.nn as nn

from ..gates import Gate
from ..sites import Gates, Site


def sites_of(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Site, Gate]]:
    """All sites of a model with gates on them, their names as seen from the model."""
    found: dict[str, tuple[Site, Gate]] = {}
    for name, module in modules.items():
        if not isinstance(module, Gates):
            continue
        prefix = name.rpartition('.')[0]
        for site in module.sites.values():
            own = site.seen_from(prefix)
            found[own.name] = own, module.of(site.name)
    return found


def paths_of(site: Site) -> list[str]:
    """Every layer of a site, and its source."""
    return [site.source, *(e.module for e in (*site.producers, *site.through, *site.consumers))]


def factors_of(name: str, site: Site, ins: Mapping[str, list]) -> list:
    """The other sites that a consumer reads if a site is a factor of all of them, made from what it
    is multiplied with, as the channel attention of CSPNeXt is."""
    if len(site.consumers) > 1 or len(site.producers) > 1:
        return []
    ends = (*site.consumers, *site.producers)
    others = [end for end in ins[site.consumers[0].module] if end[0] != name]
    read = {other for other, _ in ins.get(name, [])}
    fits = all(end.index is None for end in ends) and all(other in read for other, _ in others)
    return others if fits else []


def step_of(
    name: str, site: Site, modules: Mapping[str, Any], ins: Mapping, outs: Mapping, is_read: bool
) -> int:
    """What the number of computed channels of a site is padded to a multiple of; 1 for a site of
    few channels, or that shares layers with others."""
    parts: list[Any] = [*site.producers, *site.through, *site.consumers, *site.scales]
    alone = all(
        len(sides.get(end.module, [name])) == 1
        for sides, ends in ((outs, (*site.producers, *site.through)), (ins, site.consumers))
        for end in ends
    )
    grouped = any(getattr(modules[end.module], 'groups', 1) > 1 for end in site.consumers)
    if grouped or is_read or not alone or any(part.index is not None for part in parts):
        return 1
    return 16 if site.channels >= 128 else 8 if site.channels >= 32 else 1


def within(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f'{module}.')


def region_of(site: Site, modules: Mapping[str, nn.Module], called: Optional[set[str]]) -> str:
    """The smallest module that is called and has all layers of a site inside."""
    path = site.source
    while path:
        row = isinstance(modules[path], (nn.ModuleList, nn.ModuleDict))
        runs = not row and (called is None or path in called)
        if runs and all(within(layer, path) for layer in paths_of(site)):
            return path
        path = path.rpartition('.')[0]
    return ''
