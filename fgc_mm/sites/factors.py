# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sites whose channels are multiplied with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .flow import Flow
from .recorder import Record
from .site import Refusal, Scale, Site, follow, numbers

Tables = dict[str, np.ndarray]
"""Name of a site -> which of its decisions each decision of another meets, -1 for none."""


def with_factors(
    sites: Sequence[Site],
    followed: Mapping[str, tuple[Flow, np.ndarray]],
    record: Record,
    after: Callable[[Site, Site], bool],
) -> tuple[list[Site], list[Refusal]]:
    """Sites, and those that only make a factor of others' channels joined to them.

    Layers that make a factor, as those of squeeze-and-excitation do, are producers of the site
    whose channels it multiplies: what a closed channel would be multiplied with is not needed.

    Args:
        sites (Sequence[Site]): All that were found.
        followed (Mapping): Name -> how its channels spread, and the decision of each.
        record (Record): The pass.
        after (Callable): Whether the layers of the first run after the decision of the second.
    """
    hosts: list[Site] = []
    factors: list[tuple[Site, Tables]] = []
    refused = []
    for site in sorted(sites, key=lambda s: -len(s.consumers)):
        others = [other for other in hosts if after(site, other)]
        tables = _met(site, others, followed, record)
        if not tables:
            hosts.append(site)
            continue
        factors.append((site, tables))
        if np.any(np.stack(list(tables.values())).max(axis=0) < 0):
            reason = f'it makes a factor of the channels of {", ".join(tables)} and of others'
            refused.append(Refusal(site.name, reason))
    return [_joined(site, factors) for site in sites if site in hosts], refused


def _met(
    site: Site,
    others: Sequence[Site],
    followed: Mapping[str, tuple[Flow, np.ndarray]],
    record: Record,
) -> Tables:
    """What channels of a site are multiplied with wherever they are read."""
    flow, decisions = followed[site.name]
    tables = {}
    values = [record.nodes[number].given.value for number in flow.reads]
    for other in others:
        theirs, decided = followed[other.name]
        if not any(value in theirs.labels for value in values):
            continue
        table = np.full(site.channels, -2)
        for value in values:
            labels = theirs.labels.get(value, np.array(-1))
            mine, met = np.broadcast_arrays(flow.labels[value], labels)
            ours, its = decisions[mine[mine >= 0]], met[mine >= 0]
            its = np.where(its < 0, -1, decided[np.maximum(its, 0)])
            for decision, partner in set(zip(ours.tolist(), its.tolist(), strict=True)):
                table[decision] = partner if table[decision] in (-2, partner) else -1
        if np.any(table >= 0):
            tables[other.name] = np.maximum(table, -1)
    return tables


def _joined(site: Site, factors: Sequence[tuple[Site, Tables]]) -> Site:
    for factor, tables in factors:
        if site.name in tables:
            producers, through, scales = (
                _translated(parts, tables[site.name], site.channels)
                for parts in (factor.producers, factor.through, factor.scales)
            )
            site = replace(
                site,
                producers=site.producers + producers,
                through=tuple(dict.fromkeys((*site.through, *through))),
                scales=together(site.scales, scales),
            )
    return site


def _translated(parts: tuple, table: np.ndarray, channels: int) -> tuple:
    """Ends or scales that follow the decisions of another site."""
    return tuple(
        replace(part, index=follow(numbers(part.index, len(table)), table, channels))
        for part in parts
    )


def together(*scales: tuple[Scale, ...]) -> tuple[Scale, ...]:
    """Scales of several sites, each once."""
    return tuple(dict.fromkeys(scale for several in scales for scale in several))
