# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sites whose channels are multiplied with each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .site import Scale, Site


def with_factors(sites: Sequence[Site], after: Callable[[Site, Site], bool]) -> list[Site]:
    """Sites, and those that only make a factor of another's channels joined to it.

    Layers that make a factor, as those of squeeze-and-excitation do, are producers of the site
    whose channels it multiplies: what a closed channel would be multiplied with is not needed.

    Args:
        sites (Sequence[Site]): All that were found.
        after (Callable): Whether the layers of the first run after the decision of the second.
    """
    host: dict[str, Site] = {}
    for number, site in enumerate(sites):
        ends = set(site.consumers)
        for other_number, other in enumerate(sites):
            theirs = set(other.consumers)
            if (
                other is not site
                and other.channels == site.channels
                and (ends < theirs or (ends == theirs and other_number < number))
                and other.name not in host
                and after(site, other)
            ):
                host[site.name] = other
                break
    return [
        _joined(site, [other for other in sites if host.get(other.name) is site])
        for site in sites
        if site.name not in host
    ]


def _joined(site: Site, factors: list[Site]) -> Site:
    through = (end for factor in factors for end in factor.through)
    return replace(
        site,
        producers=site.producers + tuple(end for factor in factors for end in factor.producers),
        through=tuple(dict.fromkeys((*site.through, *through))),
        scales=together(site.scales, *(factor.scales for factor in factors)),
    )


def together(*scales: tuple[Scale, ...]) -> tuple[Scale, ...]:
    """Scales of several sites, each once."""
    return tuple(dict.fromkeys(scale for several in scales for scale in several))
