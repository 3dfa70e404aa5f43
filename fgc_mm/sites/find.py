# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding the sites of any network, or of a whole model."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Union

import numpy as np
import torch
import torch.nn as nn
from mmengine.model import revert_sync_batchnorm
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import UsageError
from ..tasks import task_of_model
from .factors import together
from .finder import Finder, Found
from .layers import is_layer
from .recorder import record_pass
from .site import Refusal, Site

Example = Union[Tensor, Sequence[Any], Mapping[str, Any]]

MODES = {False: 'predict', True: 'loss'}
"""Whether a model is in training -> the mode its forward pass is called with."""


def find_sites(module: nn.Module, example: Example, modes: Sequence[bool] = (False, True)) -> Found:
    """The places of a network where channels can be switched.

    Two passes are recorded, in evaluation and in training, and nothing of the network changes.

    Args:
        module (nn.Module): Any network.
        example (Tensor | Sequence | Mapping): What to call it with.
        modes (Sequence[bool]): The modes it is recorded in, True for training. Defaults to both.

    Returns:
        Found: The sites, and why the other layers are none.

    Raises:
        UsageError: If the network cannot be run on the example.

    Example:
        >>> find_sites(torchvision.models.resnet50(), torch.rand(1, 3, 64, 64)).sites[1]
        layer1.0.conv1 -> layer1.0.conv2
    """
    call = call_of(example)
    finders = []
    for training in modes:
        with _as_it_was(module, training):
            args, kwargs = tree_map(_twice, call) if training else call
            finders.append(Finder(module, record_pass(module, args, kwargs, is_layer)))
    return _agreed(finders)


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
        samples = task.made_up(trial, len(pictures), *shape[1:])
        trial.train(training)
        with torch.random.fork_rng(devices=[]):
            record = record_pass(trial, (pictures, samples, mode), {}, is_layer)
        finders.append(Finder(trial, record))
    found = _agreed(finders)
    found.sites = [
        replace(site, regions=finders[0].shape_read(site.name)[0] != 1) for site in found.sites
    ]
    return found


def _agreed(finders: Sequence[Finder]) -> Found:
    """The sites in all records, the first of one picture in evaluation, the last of two in
    training; with twice as many pictures another dimension than the first has not grown."""
    found = finders[0].find()
    for finder in finders[1:]:
        found = _both(found, finder.find())
    kept: list[Site] = []
    for site in found.sites:
        one, two = (finder.shape_read(site.name) for finder in (finders[0], finders[-1]))
        if one[0] == two[0] and any(2 * a == b for a, b in zip(one[1:], two[1:], strict=True)):
            reason = 'the pictures are not in the first dimension of its input'
            found.refused.append(Refusal(site.name, reason))
        else:
            kept.append(site)
    return replace(found, sites=kept)


def call_of(example: Example) -> tuple[tuple, dict]:
    """Arguments and named arguments of a call with an example."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (list, tuple)) and example:
        return tuple(example), {}
    raise UsageError(
        f'example={example!r} must be a tensor, a list of arguments or a dict of named ones, such '
        'as torch.rand(1, 3, 224, 224)'
    )


def _twice(value: Any) -> Any:
    """A batch of one has no statistics for a batch norm in training."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.size(0) == 1:
        return torch.cat([value, value])
    return value


def _both(first: Found, second: Found) -> Found:
    """What is a site in evaluation and in training."""
    mine = {site.name: site for site in second.sites}
    why = {refusal.name: refusal for refusal in second.refused}
    sites, refused = [], list(first.refused)
    known = {refusal.name for refusal in refused}
    for site in first.sites:
        other = mine.get(site.name)
        if other is not None and _alike(site, other):
            sites.append(replace(site, scales=together(site.scales, other.scales)))
        elif site.name in why:
            refused.append(Refusal(site.name, f'in training {why[site.name].reason}'))
        elif other is None:
            refused.append(Refusal(site.name, 'training does not run it'))
        else:
            refused.append(Refusal(site.name, 'other layers read it in training'))
    ran = {*known, *(site.name for site in first.sites)}
    refused += [Refusal(name, 'only training runs it') for name in mine if name not in ran]
    refused += [r for r in second.refused if r.name not in ran and r.name not in mine]
    return Found(sites, list({r.name: r for r in refused}.values()), first.first)


def _alike(a: Site, b: Site) -> bool:
    return (a.producers, set(a.consumers), a.channels) == (
        b.producers,
        set(b.consumers),
        b.channels,
    )


@contextmanager
def _as_it_was(module: nn.Module, training: bool) -> Iterator[None]:
    """Run a network in another mode; what that changes is put back."""
    modes = {part: part.training for part in module.modules()}
    buffers = {b: b.detach().clone() for b in module.buffers()}
    learns = {p: p.requires_grad for p in module.parameters()}
    others = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            for part in modes:
                part.training = False
            if training:
                module.train()
                for part in modes:  # its statistics are those of all ranks, on a GPU
                    if isinstance(part, nn.SyncBatchNorm):
                        part.training = False
            yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])
            for part, mode in modes.items():
                part.training = mode
            for parameter, learned in learns.items():
                parameter.requires_grad_(learned)
            with torch.no_grad():
                for buffer, before in buffers.items():
                    buffer.copy_(before)
