# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The sites in the record of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Optional

import numpy as np
import torch.nn as nn

from .factors import with_factors
from .flow import Escape, Flow, Follower
from .recorder import LAYER, VALUE, Call, Record, Ref
from .site import End, Refusal, Scale, Site, follow


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


@dataclass
class Source:
    """Where a gate looks.

    Attributes:
        module (str): Path of the module whose input it reads.
        given (Ref): That input, in the first call.
        axis (int): Where its channels are, 1 or -1.
        starts (list[int]): Numbers of the first nodes of the module's calls.
    """

    module: str
    given: Ref
    axis: int
    starts: list[int]


class Finder:
    """Finds the sites of a network in the record of a pass."""

    def __init__(self, module: nn.Module, record: Record) -> None:
        self.record = record
        self.follower = Follower(module, record)
        self.modules = self.follower.modules
        self.calls: dict[str, list[int]] = {}
        for number, node in enumerate(record.nodes):
            if node.op == LAYER:
                self.calls.setdefault(node.module, []).append(number)
        self._calls_of: dict[str, list[Call]] = {}
        for call in record.calls:
            self._calls_of.setdefault(call.module, []).append(call)
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
        return node.given.shape

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
        source = self._source(name)

        def ends(met: dict[str, np.ndarray]) -> tuple[End, ...]:
            return tuple(End(n, follow(i, decisions, count)) for n, i in met.items())

        self._sources[name] = source
        self._followed[name] = first, decisions
        return Site(
            source=source.module,
            source_channels=source.given.shape[source.axis],
            producers=(End(name, follow(np.arange(width), decisions, count)),),
            through=ends(first.through),
            consumers=ends(first.consumers),
            channels=count,
            axis=source.axis,
            calls=len(flows),
            scales=tuple(
                Scale(*key, follow(index, decisions, count)) for key, index in first.scales.items()
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
            reads.append(End(other.name, follow(index, decisions, other.channels)))
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

    # -- what the gate reads -------------------------------------------------------------

    def _source(self, name: str) -> Source:
        """The block around a layer if a layer in it reads the block's input, else the layer
        itself."""
        calls = self.calls[name]
        first = self.record.nodes[calls[0]]
        parts = name.split('.')
        for end in range(len(parts) - 1, 0, -1):
            path = '.'.join(parts[:end])
            if isinstance(self.modules[path], (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
                continue  # a row of blocks, not one
            own = self._calls_of.get(path, [])
            if len(own) != len(calls) or not all(
                call.start <= number < call.end for call, number in zip(own, calls, strict=True)
            ):
                continue
            given = own[0].given
            reader = self._reader_of(own[0], calls[0])
            pictures = first.outputs[0].shape[0]
            if reader is not None and given is not None and given.shape[0] == pictures:
                return Source(path, given, self._axis(reader), [call.start for call in own])
        return Source(name, first.given, self._axis(name), list(calls))

    def _reader_of(self, call: Call, before: int) -> Optional[str]:
        """The first layer in a block, up to the one in question, that reads the block's input; None
        where there is none, and for a block of a single layer."""
        nodes = self.record.nodes
        layers = [n for n in range(call.start, call.end) if nodes[n].op == LAYER]
        if call.given is None or len(layers) < 2:
            return None
        for number in layers:
            read = nodes[number].args[0] if nodes[number].args else None
            if number > before:
                return None
            if isinstance(read, Ref) and self._is_from(read, call.given, call.start, number):
                return nodes[number].module
        return None

    def _is_from(self, read: Ref, given: Ref, start: int, end: int) -> bool:
        """Whether a tensor is a block's input, as it is or normalized and activated: blocks with
        pre-activation begin so."""
        value = read.value
        for number in range(end - 1, start - 1, -1):
            node = self.record.nodes[number]
            if value == given.value:
                return True
            if value not in [ref.value for ref in node.outputs]:
                continue
            inputs = [ref for ref in node.read if ref.value not in self.record.constants]
            if node.op == LAYER or len(inputs) != 1 or inputs[0].shape != read.shape:
                return False
            value = inputs[0].value
        return value == given.value

    def _axis(self, reader: str) -> int:
        return -1 if isinstance(self.modules[reader], nn.Linear) else 1
