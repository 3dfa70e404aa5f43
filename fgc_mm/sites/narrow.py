# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Taking channels of sites out of a network for good."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Optional, Union

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from .find import Example, find_sites
from .finder import Found
from .recorder import ExampleError
from .site import End, Scale, Site, follow, is_in, numbers

Kept = Union[int, Sequence[int], Tensor, np.ndarray]
"""How many decisions stay, their numbers, or a mask of all of them."""


def narrow(
    network: nn.Module,
    sites: Sequence[Site],
    kept: Mapping[str, Kept],
    example: Union[Example, Callable[[nn.Module], Found]],
) -> tuple[list[Site], dict[str, str]]:
    """Take channels of sites out of a network.

    What is left computes what the network computes with these channels closed. Whether it does is
    seen by finding the sites anew: they must be those that are left. A
    site that cannot be narrowed stays as it is, such as one whose channels a fixed view shuffles.

    Args:
        network (nn.Module): A network without gates; it is changed.
        sites (Sequence[Site]): All sites :func:`~fgc_mm.sites.find_sites` found in it.
        kept (Mapping): Name of a site -> the decisions that stay: their number (the first ones),
            their numbers, or a mask.
        example (Tensor | Sequence | Mapping | Callable): What the network can be called with, or
            a function that finds the sites of such a network.

    Returns:
        tuple: The sites of the narrower network, in their order, and name -> reason for
        those that could not be narrowed.

    Raises:
        UsageError: If a name is no site, or what is to stay is not within its channels.

    Example:
        >>> sites = find_sites(network, example).sites
        >>> sites, refused = narrow(network, sites, {'layer1.0.conv1': 37}, example)
    """
    by_name = {site.name: site for site in sites}
    masks = {}
    for name, value in kept.items():
        site = _site_called(sites, name)
        masks[site.name] = _mask_of(site, value)
    masks = {name: mask for name, mask in masks.items() if not mask.all()}
    faults = {name: _fault(network, by_name[name]) for name in masks}
    refused = {name: fault for name, fault in faults.items() if fault is not None}
    wanted = [name for name in masks if name not in refused]
    find: Any = (
        example if callable(example) else partial(find_sites, example=example, modes=(False,))
    )

    def fault_of(names: Sequence[str]) -> Optional[str]:
        trial = copy.deepcopy(network)
        left = _cut(trial, sites, {name: masks[name] for name in names})
        return _difference(trial, left, find)

    def possible(surely: list[str], names: list[str]) -> list[str]:
        """Those of some sites that can be narrowed beside others."""
        fault = fault_of([*surely, *names]) if names else None
        if fault is None:
            return names
        if len(names) == 1:
            refused[names[0]] = fault
            return []
        middle = len(names) // 2
        first = possible(surely, names[:middle])
        return first + possible(surely + first, names[middle:])

    chosen = possible([], wanted)
    return _cut(network, sites, {name: masks[name] for name in chosen}), refused


def _site_called(sites: Sequence[Site], name: str) -> Site:
    """The site of a name, which may also be that of a depthwise convolution behind it."""
    block, _, kind = name.rpartition('.')
    old = kind == 'depthwise'  # as MobileNetV2's convolution was once called
    fits: Sequence[Callable[[Site], bool]] = (
        lambda site: site.name == name,
        lambda site: any(end.module == name for end in site.through),
        lambda site: old and any(is_in(end.module, block) for end in site.through),
    )
    for fit in fits:
        for site in filter(fit, sites):
            return site
    raise UsageError(f'{name!r} is no site; there are {", ".join(site.name for site in sites)}')


def _mask_of(site: Site, kept: Kept) -> np.ndarray:
    """What stays of a site, as a mask of its decisions."""
    count = site.channels
    mask = np.zeros(count, bool)
    if isinstance(kept, int) and not isinstance(kept, bool):
        index: Any = np.arange(kept)
        fits = 1 <= kept <= count
    else:
        index = np.asarray(kept.cpu() if isinstance(kept, Tensor) else kept)
        if index.dtype == bool:
            index = index.nonzero()[0] if index.shape == mask.shape else np.array([])
        fits = index.ndim == 1 and len(index) > 0 and index.min() >= 0 and index.max() < count
    if not fits:
        raise UsageError(
            f'site {site.name!r} has {count} channels to switch: {kept!r} must be a number of '
            f'channels from 1 to {count}, or the numbers of those that stay'
        )
    mask[index] = True
    return mask


def _fault(network: nn.Module, site: Site) -> Optional[str]:
    """Why a site cannot be narrowed whatever stays of it."""
    for end in site.consumers:
        if getattr(network.get_submodule(end.module), 'groups', 1) > 1:
            return f'{end.module} reads it in groups, and all of them must stay equally wide'
    for (name, _), part in _parts(site):
        index = numbers(part.index, site.channels)
        counts = np.bincount(index[index >= 0], minlength=site.channels)
        if len(set(counts.tolist())) > 1:
            return f'{name} has not as many channels for each of its decisions'
    return None


Key = tuple[str, int]
"""A module or the name of a tensor, and the dimension of the weight or tensor."""


def _parts(site: Site) -> Iterator[tuple[Key, Union[End, Scale]]]:
    """All that has channels of a site."""
    for end in (*site.producers, *site.through):
        yield (end.module, 0), end
    for end in site.consumers:
        yield (end.module, 1), end
    for scale in site.scales:
        yield (scale.tensor, scale.dim), scale


def _cut(network: nn.Module, sites: Sequence[Site], masks: Mapping[str, np.ndarray]) -> list[Site]:
    """Narrow a network to the decisions that stay of some of its sites, without a look at whether
    that can be; returns the sites it has now."""
    masks = {site.name: np.ones(site.channels, bool) for site in sites} | dict(masks)
    stays: dict[Key, np.ndarray] = {}
    for site in sites:
        for key, part in _parts(site):
            mine = _staying(part, masks[site.name])
            stays[key] = stays.get(key, np.ones_like(mine)) & mine
    modules = dict(network.named_modules())
    for (name, dim), kept in stays.items():
        if kept.all():
            continue
        if name not in modules:
            owner, _, tensor = name.rpartition('.')
            _take(modules[owner], tensor, dim, kept)
            continue
        layer = modules[name]
        if dim == 0 and getattr(layer, 'groups', 1) > 1:
            layer.groups = int(layer.groups * kept.mean() + 0.5)  # type: ignore[assignment,operator]
        _take(layer, 'weight', dim, kept)
        if dim == 0 and getattr(layer, 'bias', None) is not None:
            _take(layer, 'bias', 0, kept)
    return [_narrower(site, masks, stays) for site in sites]


def _narrower(site: Site, masks: Mapping[str, np.ndarray], stays: Mapping[Key, np.ndarray]) -> Site:
    """A site of what is left."""
    mask, source = masks[site.name], source_mask(site, masks)
    new = {key: _left(part, stays[key], mask) for key, part in _parts(site)}
    return replace(
        site,
        source_channels=int(source.sum()),
        producers=tuple(new[end.module, 0] for end in site.producers),
        through=tuple(new[end.module, 0] for end in site.through),
        consumers=tuple(new[end.module, 1] for end in site.consumers),
        channels=int(mask.sum()),
        scales=tuple(new[scale.tensor, scale.dim] for scale in site.scales),
        reads=tuple(
            _left(read, source, masks[read.module]) if read.module in masks else read
            for read in site.reads
        ),
    )


def source_mask(site: Site, masks: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which channels stay of the input that the gate of a site reads.

    Args:
        site (Site): The site, before.
        masks (Mapping): Site -> the decisions that stay.
    """
    source = np.ones(site.source_channels, bool)
    for read in site.reads:
        if read.module in masks:
            source &= _staying(read, masks[read.module])
    return source


def _staying(part: Union[End, Scale], mask: np.ndarray) -> np.ndarray:
    """Which channels stay, by the decisions that do."""
    index = numbers(part.index, len(mask))
    return (index < 0) | mask[np.maximum(index, 0)]


def _left(part: Any, stays: np.ndarray, mask: np.ndarray) -> Any:
    """An end or scale with only the channels and decisions that stay."""
    index = numbers(part.index, len(mask))[stays]
    return replace(part, index=follow(index, np.cumsum(mask) - 1, int(mask.sum())))


def _take(module: nn.Module, name: str, dim: int, stays: np.ndarray) -> None:
    tensor = getattr(module, name)
    index = torch.as_tensor(stays.nonzero()[0], device=tensor.device)
    replace_tensor(module, name, tensor.detach().index_select(dim, index))


def replace_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module another tensor in place of a parameter or buffer, of any shape.

    Args:
        module (nn.Module): Its owner.
        name (str): Its name in there.
        value (Tensor): The new one.
    """
    if name in module._parameters:
        before = module._parameters[name]
        assert before is not None
        module._parameters[name] = nn.Parameter(value, before.requires_grad)
    else:
        module._buffers[name] = value
    _tell_widths(module)


def _tell_widths(module: Any) -> None:
    """Have the attributes of a layer say what its tensors say."""
    weight: Any = getattr(module, 'weight', None)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        module.out_channels, module.in_channels = (
            weight.shape[0],
            weight.shape[1] * module.groups,
        )
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        given = next((t for t in (weight, module.running_mean) if t is not None), None)
        module.num_features = module.num_features if given is None else len(given)
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(weight)


def _difference(
    network: nn.Module, expected: Sequence[Site], find: Callable[[nn.Module], Found]
) -> Optional[str]:
    """What differs between the sites of a narrowed network and those it should have."""
    try:
        found = find(network)
    except ExampleError as error:
        return f'without some channels it does not run: {error.__cause__}'
    have = {site.name: site for site in found.sites}
    single = {site.name for site in expected if site.channels == 1}  # which are never found
    for site in expected:
        if site.name in single:
            continue
        other = have.get(site.name)
        same = other is not None and all(
            set(getattr(site, kind)) == set(getattr(other, kind))
            for kind in ('producers', 'through', 'consumers')
        )
        if other is None or not same or not set(other.scales) <= set(site.scales):
            return f'without some channels other ones of {site.name} reach its consumers'
        reads = {read for read in site.reads if read.module not in single}
        if reads != {read for read in other.reads if read.module not in single}:
            return f'without some channels the gate of {site.name} reads other ones'
    return None
