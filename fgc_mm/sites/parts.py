# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sites in the parts of a whole model: the heads of a detector, the neck, a segmentor's head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn as nn
from mmengine.model import revert_sync_batchnorm

from ..errors import UsageError
from ..tasks import task_of_model
from .find import Finder, Found, both, find_sites, of_pictures
from .layers import is_layer
from .recorder import record_pass
from .site import End, Refusal, Site

MODES = {False: 'predict', True: 'loss'}
"""Whether a model is in training -> the mode its forward pass is called with."""


def find_in_model(model: nn.Module, shape: tuple[int, int, int]) -> Found:
    """The sites of a whole model of OpenMMLab: a detector, a segmentor, a classifier.

    A copy of it predicts a picture, and has the losses of two computed, with annotations that
    nobody made. So every layer runs that does in testing and in training, heads on regions too.

    Args:
        model (nn.Module): The model, whose ``forward`` takes inputs, data samples and a mode.
        shape (tuple): Channels, height and width of a picture.

    Raises:
        UsageError: If it cannot be run on pictures of that shape.
    """
    task = task_of_model(model)
    trial = revert_sync_batchnorm(copy.deepcopy(model))
    task.undemanding(trial)
    generator = torch.Generator().manual_seed(0)  # that of the training is left alone
    finders = []
    for training, mode in MODES.items():
        pictures = torch.rand(1 + training, *shape, generator=generator)
        samples = task.made_up(len(pictures), *shape[1:])
        trial.train(training)
        with torch.random.fork_rng(devices=[]):
            record = record_pass(trial, (pictures, samples, mode), {}, is_layer)
        finders.append(Finder(trial, record))
    found = of_pictures(both(*(finder.find() for finder in finders)), finders)
    found.sites = [
        replace(site, regions=finders[0].shape_read(site.name)[0] != 1) for site in found.sites
    ]
    return found


def find_in_part(model: nn.Module, part: str, shape: tuple[int, int, int]) -> Found:
    """The sites of a part that takes pictures and nothing else, as a backbone does.

    Args:
        model (nn.Module): The model.
        part (str): Name of the part.
        shape (tuple): Channels, height and width of a picture.
    """
    return find_sites(model.get_submodule(part), torch.zeros(1, *shape))


def is_in(name: str, part: str) -> bool:
    """Whether a module belongs to a part of a model."""
    return name == part or name.startswith(f'{part}.')


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
            mine.sites.append(seen_from(part, site))
    return mine


def seen_from(part: str, site: Site) -> Site:
    """A site of a model as one of a part.

    Args:
        part (str): Name of the part.
        site (Site): The site, all of it in the part.
    """

    def inner(name: str) -> str:
        return name[len(part) + 1 :]

    def ends(given: Sequence[End]) -> tuple[End, ...]:
        return tuple(replace(end, module=inner(end.module)) for end in given)

    return replace(
        site,
        source=inner(site.source),
        producers=ends(site.producers),
        through=ends(site.through),
        consumers=ends(site.consumers),
        scales=tuple(replace(scale, tensor=inner(scale.tensor)) for scale in site.scales),
        reads=ends([end for end in site.reads if is_in(end.module, part)]),
    )


def seen_in(part: str, site: Site) -> Site:
    """A site of a part as one of the model: what :func:`seen_from` undoes.

    Args:
        part (str): Name of the part.
        site (Site): The site.
    """

    def outer(name: str) -> str:
        return f'{part}.{name}' if name else part

    def ends(given: Sequence[End]) -> tuple[End, ...]:
        return tuple(replace(end, module=outer(end.module)) for end in given)

    return replace(
        site,
        source=outer(site.source),
        producers=ends(site.producers),
        through=ends(site.through),
        consumers=ends(site.consumers),
        scales=tuple(replace(scale, tensor=outer(scale.tensor)) for scale in site.scales),
        reads=ends(site.reads),
    )


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
