# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Choosing among the sites of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from ..errors import UsageError, in_context
from ..gates import match_blocks
from .site import Site

Choice = Union[str, int, Sequence[Union[str, int]]]


def choose(sites: Sequence[Site], wanted: Choice, stem: Sequence[str] = ()) -> list[Site]:
    """The sites that a config value names.

    Args:
        sites (Sequence[Site]): All there are.
        wanted (str | int | Sequence): ``'all'`` but the stem, ``'last_stage'``, ``'stem'``, the
            name of a site, a block or a stage, the number of a block (negative counts from
            the end), or a list of those.
        stem (Sequence[str]): Names of the sites that ``'all'`` leaves out.

    Raises:
        UsageError: If a name fits none; the message has the names there are.
    """
    items = [wanted] if isinstance(wanted, (str, int)) else list(wanted)
    body = [site for site in sites if site.name not in stem]
    names = {site.name for site in sites}
    blocks = list(dict.fromkeys(site.source for site in body))
    chosen: set[str] = set()
    for item in items:
        if item == 'stem':
            chosen.update(stem)
        elif item in names:
            chosen.add(str(item))
        elif body:
            with in_context('', f', or a site: {", ".join(sorted(names))}'):
                found = match_blocks(item, blocks, 'sites')
            chosen.update(site.name for site in body if site.source in found)
    if not chosen:
        raise UsageError(f'sites={wanted!r} chooses no site; there are {", ".join(sorted(names))}')
    return [site for site in sites if site.name in chosen]
