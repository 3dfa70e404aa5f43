# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A whole detector, segmentor or classifier, gated in the parts that are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Optional, Union

import torch
import torch.nn as nn

from ..errors import UsageError, in_context
from ..sites import Found, gate_sites
from ..sites.choose import Choice, choose
from ..sites.find import find_in_model
from ..sites.gate import gate as gate_network
from ..sites.gate import narrow_found, narrowed, remember, stem_of
from ..sites.narrow import Kept
from ..sites.origin import InModel
from ..sites.parts import check_parts, in_part
from ..sites.recorder import ExampleError
from ..sites.site import is_in
from .weights import watch_weights

Shape = tuple[int, int, int]
Parts = Union[str, Sequence[str]]

SIZES = (64, 224)
"""Sides of the pictures a network is tried on if its config names none."""


def gate_model(
    model: nn.Module,
    part: Parts,
    gate: Optional[dict],
    sites: Choice = 'all',
    convs: Optional[Sequence[str]] = None,
    example: Optional[Shape] = None,
    follow_freeze: bool = False,
    widths: Optional[Mapping[str, Kept]] = None,
) -> nn.Module:
    """Gate parts of a model.

    Args:
        model (nn.Module): The model; it is changed and returned. Each part gets a child ``gates``.
        part (str | Sequence[str]): Names of the parts, such as ``('backbone', 'rpn_head')``.
        gate (dict, optional): Config of the gates; None for none.
        sites (str | int | Sequence): See :func:`~fgc_mm.nets.Gated`; names with the part in front.
            Defaults to 'all'.
        convs (Sequence[str], optional): Likewise ``gated_convs``. Defaults to None.
        example (tuple, optional): Channels, height and width of a picture. Defaults to None, tried
            out.
        follow_freeze (bool): Likewise ``gates_follow_freeze``. Defaults to False.
        widths (Mapping, optional): Likewise. Defaults to None.

    Raises:
        UsageError: If there is no such part, the forward pass never runs it, or it has no site.
    """
    parts = [part] if isinstance(part, str) else list(part)
    with in_context('Gated'):
        check_parts(model, parts)
    shapes = [example] if example else [(3, size, size) for size in SIZES]
    last: Optional[ExampleError] = None
    for shape in shapes:
        try:
            if parts == ['backbone']:  # a picture is all that it takes
                backbone, pictures = model.get_submodule('backbone'), torch.zeros(1, *shape)
                if gate is None:
                    narrowed(backbone, widths or {}, pictures)
                else:
                    gate_network(
                        backbone, pictures, gate, sites, follow_freeze, convs, widths=widths
                    )
            else:
                _gate_parts(model, parts, shape, gate, sites, convs, follow_freeze, widths)
            for name in parts:
                watch_weights(model.get_submodule(name))
            return model
        except ExampleError as error:
            last = error
    raise UsageError(
        f'{last}; in a config: Gated(example=(channels, height, width), ...). To gate a backbone '
        "alone a picture is enough: backbone=dict(type='Gated', backbone=dict(type=...))"
    ) from last


def _gate_parts(
    model: nn.Module,
    parts: Sequence[str],
    shape: Shape,
    gate: Optional[dict],
    sites: Choice,
    convs: Optional[Sequence[str]],
    follow_freeze: bool,
    widths: Optional[Mapping[str, Kept]],
) -> None:
    find = partial(find_in_model, shape=shape)
    whole = narrow_found(model, find(model), widths or {}, find)
    if gate is None:
        return
    found = {part: in_part(whole, part) for part in parts}
    named, stem = [], []
    for part, mine in found.items():
        check_found(model, part, mine)
        named += [site.seen_from(part) for site in mine.sites]
        if mine.first:
            stem = [f'{part}.{name}' for name in stem_of(model.get_submodule(part), mine)]
    chosen = {site.name for site in choose(named, sites, stem, convs)}
    for part, mine in found.items():
        own = [site for site in mine.sites if f'{part}.{site.name}' in chosen]
        if own:
            gates = gate_sites(model.get_submodule(part), own, gate, follow_freeze)
            gates.example = InModel(part, shape)
            own_widths = {
                name.removeprefix(f'{part}.'): kept
                for name, kept in (widths or {}).items()
                if is_in(name, part)
            }
            remember(model.get_submodule(part), gates, gate, own_widths, follow_freeze)


def check_found(model: nn.Module, part: str, found: Found) -> None:
    """See that a part runs and has a site.

    Args:
        model (nn.Module): The model.
        part (str): Name of the part.
        found (Found): What was found in it.

    Raises:
        UsageError: If not; it says why.
    """
    name = f'part={part!r} of {type(model).__name__}'
    if not found.sites and not found.refused:
        raise UsageError(
            f'Gated: the forward pass never runs {name}, neither in testing nor in training; leave '
            'it out'
        )
    if not found.sites:
        reasons = '; '.join(f'{r.name}: {r.reason}' for r in found.refused[:3])
        raise UsageError(f'Gated: {name} has no site to put a gate on ({reasons}); leave it out')
