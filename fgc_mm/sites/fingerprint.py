# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Whether the gates of a checkpoint are those of a network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointError
from .site import Site


def fingerprint(site: Site) -> dict[str, Any]:
    """What a checkpoint says of a site: its place in the graph of the network.

    Args:
        site (Site): The site.

    Returns:
        dict: ``channels``, ``source``, ``consumers`` and ``digest``, of all layers it has to do
        with, their channels and connections.
    """
    graph = (
        site.source,
        site.source_channels,
        *(sorted(map(repr, ends)) for ends in (site.producers, site.through, site.consumers)),
        site.channels,
        site.axis,
        site.calls,
    )
    return dict(
        channels=site.channels,
        source=site.source,
        consumers=[end.module for end in site.consumers],
        digest=hashlib.sha256(repr(graph).encode()).hexdigest()[:16],
    )


def check_same(sites: Iterable[Site], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """See that gates of a checkpoint decide over what they were trained for.

    Args:
        sites (Iterable[Site]): The sites of the network.
        saved (Mapping): Site -> its fingerprint in the checkpoint. Sites that only one of both has
            are not looked at.

    Raises:
        CheckpointError: If a site is another one; it names it.
    """
    for site in sites:
        mine, theirs = fingerprint(site), saved.get(site.name)
        if theirs is None or theirs['digest'] == mine['digest']:
            continue
        raise CheckpointError(
            f'the checkpoint is of another network: its gate of {site.name!r} decides over '
            f'{_said(theirs)}, and here over {_said(mine)}; load it into the network it was '
            'trained in'
        )


def _said(found: Mapping[str, Any]) -> str:
    return (
        f'{found["channels"]} channels by the input of {found["source"]!r}, read by '
        f'{", ".join(found["consumers"])}'
    )
