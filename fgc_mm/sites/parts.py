# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The parts of a model and their sites: the heads of a detector, the neck, a segmentor's head."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn

from ..errors import UsageError
from .finder import Found
from .layers import is_layer
from .site import Refusal, is_in


def in_part(found: Found, part: str) -> Found:
    """What was found in one part of a model, with names as they are seen from the part.

    A site whose channels are read in another part is none of this one.

    Args:
        found (Found): What was found in the whole model.
        part (str): Name of the part.
    """
    mine = Found(
        refused=[
            Refusal(refusal.name[len(part) + 1 :], refusal.reason)
            for refusal in found.refused
            if is_in(refusal.name, part)
        ],
        first=found.first[len(part) + 1 :] if is_in(found.first, part) else '',
    )
    for site in found.sites:
        if not is_in(site.name, part):
            continue
        ends = (*site.producers, *site.through, *site.consumers)
        outside = [n for n in (*(e.module for e in ends), site.source) if not is_in(n, part)]
        name = site.name[len(part) + 1 :]
        if outside:
            mine.refused.append(Refusal(name, f'{outside[0]} has to do with it, outside of {part}'))
        else:
            mine.sites.append(site.seen_in(part))
    return mine


def check_parts(model: nn.Module, parts: Sequence[str]) -> None:
    """See that a model has parts of these names, none in another.

    Args:
        model (nn.Module): The model.
        parts (Sequence[str]): The names.

    Raises:
        UsageError: If not; it names the parts there are.
    """
    modules = dict(model.named_modules())
    for part in parts:
        if not part or part not in modules:
            known = ', '.join(
                repr(name) for name, child in model.named_children() if has_layer(child)
            )
            raise UsageError(
                f'part={part!r} is no part of {type(model).__name__}; name some of {known}'
            )
        around = [other for other in parts if other != part and is_in(part, other)]
        if around:
            raise UsageError(f'part={part!r} lies in {around[0]!r}, which is named as well')
    if len(set(parts)) < len(parts) or not parts:
        raise UsageError(f'part={tuple(parts)!r} must name one part or more, each of them once')


def has_layer(module: nn.Module) -> bool:
    """Whether there is a convolution or linear layer in a module."""
    return any(map(is_layer, module.modules()))
