# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Choosing among the sites of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

from ..errors import UsageError, in_context
from ..gates import match_blocks
from .site import Site

Choice = Union[str, int, Sequence[Union[str, int]]]


def choose(
    sites: Sequence[Site],
    wanted: Choice,
    stem: Sequence[str] = (),
    convs: Optional[Sequence[str]] = None,
    key: str = 'sites',
    within_blocks: bool = False,
) -> list[Site]:
    """The sites that a config value names.

    Args:
        sites (Sequence[Site]): All there are.
        wanted (str | int | Sequence): ``'all'`` but the stem, ``'last_stage'``, ``'stem'``, the
            name of a site, a block or a stage, the number of a block (negative counts from
            the end), or a list of those.
        stem (Sequence[str]): Names of the sites that ``'all'`` leaves out.
        convs (Sequence[str], optional): Of the sites chosen those whose name is or ends with one of
            these: ``'conv2'`` of every block, ``'layer1.0.conv2'``. Defaults to None, every one.
        key (str): What the choice is called in the config, for the error. Defaults to 'sites'.
        within_blocks (bool): Choose a site whose channels leave the block only by its own name.
            Defaults to False.

    Raises:
        UsageError: If a name fits none; the message has the names there are.
    """
    items = [wanted] if isinstance(wanted, (str, int)) else list(wanted)
    body = [site for site in sites if site.name not in stem]
    if within_blocks:
        body = [site for site in body if stays_inside(site)]
    names = {site.name for site in sites}
    blocks = list(dict.fromkeys(site.source for site in body))
    chosen: set[str] = set()
    for item in items:
        if item == 'stem':
            if not stem:
                raise UsageError(f"{key}: 'stem' has no site here; there are {', '.join(names)}")
            chosen.update(stem)
        elif item in names:
            chosen.add(str(item))
        elif body:
            with in_context('', f', or a site: {", ".join(sorted(names))}'):
                found = match_blocks(item, blocks, key)
            chosen.update(site.name for site in body if site.source in found)
    if not chosen:
        raise UsageError(f'{key}={wanted!r} chooses no site; there are {", ".join(sorted(names))}')
    picked = [site for site in sites if site.name in chosen]
    if convs is None:
        return picked
    for conv in convs:
        if not any(is_called(site, conv) for site in sites):
            last = ', '.join(dict.fromkeys(site.name.rpartition('.')[2] for site in body))
            raise UsageError(
                f'gated_convs={list(convs)}: {conv!r} is no site; name some of {last}, or one of a '
                f'single block such as {sites[-1].name!r}'
            )
    picked = [site for site in picked if any(is_called(site, conv) for conv in convs)]
    if not picked:
        raise UsageError(f'gated_convs={list(convs)} are not among the sites of {key}={wanted!r}')
    return picked


def stays_inside(site: Site) -> bool:
    """Whether all that read a site's channels are in the block whose input its gate reads."""
    return all(end.module.startswith(f'{site.source}.') for end in site.consumers)


def is_called(site: Site, name: str) -> bool:
    """Whether a name is that of a site, or of its layer in a block."""
    return site.name == name or site.name.endswith(f'.{name}')
