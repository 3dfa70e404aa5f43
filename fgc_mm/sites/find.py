# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding the sites of any network."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Optional, Union

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import UsageError
from .factors import plain, together, with_factors
from .flow import Escape, Flow, Follower
from .layers import is_layer
from .recorder import LAYER, VALUE, Record, record_pass
from .site import End, Refusal, Scale, Site
from .sources import Source, find_source

Example = Union[Tensor, Sequence[Any], Mapping[str, Any]]


@dataclass
class Found:
    """What :func:`find_sites` found.

    Attributes:
        sites (list[Site]): In the order they run in.
        refused (list[Refusal]): The other layers, with the reason.
        first (str): Path of the layer that runs first.
    """

    sites: list[Site] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    first: str = ''


class Finder:
    """Finds sites in the record of a pass.

    Args:
        module (nn.Module): The network.
        record (Record): Its pass.
    """

    def __init__(self, module: nn.Module, record: Record) -> None:
        self.record = record
        self.follower = Follower(module, record)
        self.modules = self.follower.modules
        self.calls: dict[str, list[int]] = {}
        for number, node in enumerate(record.nodes):
            if node.op == LAYER:
                self.calls.setdefault(node.module, []).append(number)
        self._sources: dict[str, Source] = {}
        self._followed: dict[str, tuple[Flow, np.ndarray]] = {}

    def find(self) -> Found:
        """Follow every layer's output."""
        found = Found(first=next(iter(self.calls), ''))
        for name in self.calls:
            try:
                found.sites.append(self._site(name))
            except Escape as escape:
                found.refused.append(Refusal(name, str(escape)))
        sites, factors = with_factors(found.sites, self._followed, self.record, self._runs_after)
        found.sites = []
        found.refused += factors
        for site in sites:
            try:
                found.sites.append(replace(site, reads=self._reads(site, sites)))
            except Escape as escape:
                found.refused.append(Refusal(site.name, str(escape)))
        return found

    def shape_read(self, name: str) -> tuple[int, ...]:
        """Shape of what a layer reads in its first call."""
        node = self.record.nodes[self.calls[name][0]]
        read = node.args[0] if node.args else next(iter(node.kwargs.values()))
        return read.shape

    def _site(self, name: str) -> Site:
        fault = self.follower.fault(name)
        if fault:
            raise Escape(fault)
        layer = self.modules[name]
        if getattr(layer, 'groups', 1) > 1:
            raise Escape('it is grouped: it is switched by the layer before it')
        width = layer.weight.shape[0]
        if width < 2:
            raise Escape('it has a single channel')
        flows = [self.follower.follow(number) for number in self.calls[name]]
        first = flows[0]
        if not all(flow.ends_as(first) for flow in flows):
            raise Escape('its calls are read by different layers')
        self._check_calls(name, first)
        for number, flow in zip(self.calls[name], flows, strict=True):
            self._check_values(number, flow.reads)
        decisions = first.decisions(width)
        count = int(decisions.max()) + 1
        if count < 2:
            raise Escape('all of its channels belong together')
        source = find_source(self.record, self.modules, name, self.calls[name])
        self._sources[name] = source
        self._followed[name] = first, decisions
        return Site(
            source=source.module,
            source_channels=source.given.shape[source.axis],
            producers=(End(name, _followed(np.arange(width), decisions)),),
            through=_ends(first.through, decisions),
            consumers=_ends(first.consumers, decisions),
            channels=count,
            axis=source.axis,
            calls=len(flows),
            scales=tuple(
                Scale(*key, _followed(index, decisions)) for key, index in first.scales.items()
            ),
        )

    def _reads(self, site: Site, sites: Sequence[Site]) -> tuple[End, ...]:
        """The sites whose channels a gate would read."""
        given, reads = self._sources[site.name].given, []
        dim = site.axis % len(given.shape)
        for other in sites:
            flow, decisions = self._followed[other.name]
            if given.value not in flow.labels:
                continue
            met = flow.labels[given.value]
            if any(size > 1 for d, size in enumerate(met.shape) if d != dim):
                raise Escape(f'its gate would read {other.name} across its channels')
            index = np.broadcast_to(met.reshape(-1), (given.shape[dim],))
            reads.append(End(other.name, _followed(index, decisions)))
        return tuple(reads)

    def _check_calls(self, name: str, flow: Flow) -> None:
        """What is in between or behind is called once for each call of the layer."""
        times = len(self.calls[name])
        for other in (*flow.consumers, *flow.through):
            if len(self.calls[other]) != times:
                raise Escape(f'{other} reads it in {times} of its {len(self.calls[other])} calls')
        if times == 1:
            return
        for other in (*flow.consumers, *flow.through):
            ahead = zip(self.calls[name], self.calls[other], strict=True)
            later = [*self.calls[name][1:], len(self.record.nodes)]
            for (mine, theirs), following in zip(ahead, later, strict=True):
                if not mine < theirs < following:
                    raise Escape(f'{other} is called when the next decision has been made')

    def _check_values(self, number: int, reads: list[int]) -> None:
        """No values decide what runs in the part of the network that holds the layers.

        Another picture could go another way there, on which something else reads the channels.
        """
        last = max(reads)
        around = [c for c in self.record.calls if c.start <= number and last < c.end]
        part = min(around, key=lambda call: call.end - call.start)
        if any(self.record.nodes[n].op == VALUE for n in range(part.start, part.end)):
            where = part.module or 'the network'
            raise Escape(f'the forward pass of {where} depends on the values of its input')

    def _runs_after(self, site: Site, other: Site) -> bool:
        """Whether the layers of one site run after the decision of another."""
        starts = self._sources[other.name].starts
        ends = (*site.producers, *site.through)
        return all(
            len(self.calls[end.module]) == len(starts)
            and all(a <= b for a, b in zip(starts, self.calls[end.module], strict=True))
            for end in ends
        )


def _ends(found: dict[str, np.ndarray], decisions: np.ndarray) -> tuple[End, ...]:
    return tuple(End(name, _followed(index, decisions)) for name, index in found.items())


def _followed(index: np.ndarray, decisions: np.ndarray) -> Optional[tuple[int, ...]]:
    """For each channel of a layer or a tensor the decision it follows, None if they are equal."""
    followed = np.where(index >= 0, decisions[np.maximum(index, 0)], -1)
    return plain(followed, int(decisions.max()) + 1)


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
    args, kwargs = call_of(example)
    finders: list[Finder] = []
    found: Optional[Found] = None
    for training in modes:
        with _as_it_was(module, training):
            given = tree_map(_twice, (args, kwargs)) if training else (args, kwargs)
            record = record_pass(module, given[0], given[1], is_layer)
        finders.append(Finder(module, record))
        mine = finders[-1].find()
        found = mine if found is None else both(found, mine)
    assert found is not None
    return of_pictures(found, finders)


def of_pictures(found: Found, finders: Sequence[Finder]) -> Found:
    """The sites whose layers have the pictures in the first dimension: with twice as many of them
    another one has not grown in its place.

    Args:
        found (Found): The sites.
        finders (Sequence[Finder]): Those who found them, the first with one picture.
    """
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


def both(first: Found, second: Found) -> Found:
    """What is a site in both modes.

    Args:
        first (Found): In evaluation.
        second (Found): In training.
    """
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
