# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The sites of a model: which belong together, and what is around them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Optional

import torch.nn as nn
from torch import Tensor

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


def within(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f'{module}.')


def groups(sites: Mapping[str, Site]) -> list[set[str]]:
    """Sites that share a layer on the same side, together."""
    found: list[tuple[set[str], set[str]]] = []
    for name, site in sites.items():
        names = {name}
        layers = {f'reads {end.module}' for end in site.consumers}
        layers |= {f'makes {end.module}' for end in (*site.producers, *site.through)}
        apart = []
        for others, shared in found:
            if shared & layers:
                names |= others
                layers |= shared
            else:
                apart.append((others, shared))
        found = [*apart, (names, layers)]
    return [names for names, _ in found]


def region_of(
    sites: Sequence[Site], modules: Mapping[str, nn.Module], called: Optional[set[str]]
) -> str:
    """The smallest module that is called and has all layers of some sites inside."""
    paths = [path.split('.') for site in sites for path in paths_of(site)]
    common = [
        parts[0]
        for parts in itertools.takewhile(lambda p: len(set(p)) == 1, zip(*paths, strict=False))
    ]
    while common:
        path = '.'.join(common)
        row = isinstance(modules[path], (nn.ModuleList, nn.ModuleDict))
        if not row and (called is None or path in called):
            return path
        common = common[:-1]
    return ''


def put_back(module: nn.Module, order: list, taken: list) -> None:
    """Hooks that were taken off a module, in their places."""
    hooks, flags = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    mine = {number: (hook, flag) for number, hook, flag in taken}
    now = dict(hooks)
    hooks.clear()
    for number in order:
        if number in mine:
            hooks[number] = mine[number][0]
            if mine[number][1]:
                flags[number] = True
        elif number in now:
            hooks[number] = now.pop(number)
    hooks.update(now)


def first_of(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The first image of a batch, if tensors are all there is."""
    values = [*args, *kwargs.values()]
    count = len(values[0]) if values and isinstance(values[0], Tensor) else 0
    if not all(isinstance(v, Tensor) and v.dim() and len(v) == count for v in values):
        return args, kwargs
    return tuple(v[:1] for v in args), {name: v[:1] for name, v in kwargs.items()}
