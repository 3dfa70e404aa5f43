# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How the channels of one call of a layer spread through a pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import numpy as np
import torch.nn as nn

from .images import Images
from .layers import channel_axis, is_layer, layer_fault
from .recorder import LAYER, Node, Record, Ref
from .rules import Labels, NotPrivate, along, step
from .scales import Key, ScaleFinder


@dataclass
class Flow:
    """What the channels of one call of a layer met.

    Attributes:
        labels (dict): Tensor -> its labels.
        images (Images): Where the pictures are in these tensors.
        through (dict): Grouped convolution in between -> the label of each output channel.
        consumers (dict): Layer that reads them -> the label of each input channel.
        reads (list): Numbers of the nodes of those layers.
        merged (dict): Label -> a lower one that it belongs together with.
        passed (dict): Tensor -> the grouped convolutions on its way.
        scales (dict): Parameter and dimension -> the label that each entry meets.
    """

    labels: dict[int, Labels]
    images: Images
    through: dict[str, np.ndarray] = field(default_factory=dict)
    consumers: dict[str, np.ndarray] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)
    merged: dict[int, int] = field(default_factory=dict)
    passed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    scales: dict[Key, np.ndarray] = field(default_factory=dict)

    def ends_as(self, other: Flow) -> bool:
        """Whether another call of the layer is read in the same way."""
        return self.merged == other.merged and all(
            a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
            for a, b in ((self.consumers, other.consumers), (self.through, other.through))
        )

    def merge_groups(self, index: np.ndarray, groups: int) -> None:
        """What enters a grouped convolution in one group is switched together."""
        for row in index.reshape(groups, -1):
            row = row[row >= 0]
            for label in row[1:]:
                self._unite(int(row[0]), int(label))

    def _unite(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self.merged[max(a, b)] = min(a, b)

    def _root(self, label: int) -> int:
        while label in self.merged:
            label = self.merged[label]
        return label

    def decisions(self, width: int) -> np.ndarray:
        """For each channel of the layer the number of its decision."""
        roots = [self._root(label) for label in range(width)]
        number = {root: i for i, root in enumerate(dict.fromkeys(roots))}
        return np.array([number[root] for root in roots])


class Escape(Exception):
    """Channels that are no site; ``passed`` are the grouped convolutions on their way."""

    def __init__(self, reason: str, passed: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.passed = passed


class Follower:
    """Follows the outputs of a network's layers through the record of a pass."""

    def __init__(self, module: nn.Module, record: Record) -> None:
        self.modules = dict(module.named_modules())
        self.record = record
        self.readers = record.readers()
        self.scales = ScaleFinder(module, record)
        self.shared = self._shared(module)

    def _shared(self, module: nn.Module) -> dict[str, str]:
        """Layer -> who reads its weights as well."""
        named = dict(module.named_parameters())
        users: dict[int, str] = {}
        for node in self.record.nodes:
            for ref in node.read:
                name = self.record.names.get(ref.value)
                if name in named:
                    where = f'the forward pass of {node.module}' if node.module else 'the network'
                    users.setdefault(id(named[name]), where)
        found: dict[str, str] = {}
        owners: dict[int, str] = {}
        for name, layer in self.modules.items():
            weight = getattr(layer, 'weight', None)
            if not is_layer(layer) or weight is None:
                continue
            if id(weight) in users:
                found[name] = users[id(weight)]
            if id(weight) in owners:
                found[name] = owners[id(weight)]
                found.setdefault(owners[id(weight)], name)
            owners.setdefault(id(weight), name)
        return found

    def fault(self, name: str) -> Optional[str]:
        """Why the channels of a layer cannot be switched, None if they can."""
        if name in self.shared:
            return f'its weights are used by {self.shared[name]} as well'
        return layer_fault(self.modules[name])

    def follow(self, number: int) -> Flow:
        """Follow one call; a grouped convolution on the way is passed where that is possible."""
        stops: set[int] = set()
        while True:
            try:
                return self._sweep(number, stops)
            except Escape as escape:
                if not escape.passed:
                    raise
                stops.add(escape.passed[-1])

    def axis(self, node: Node, ref: Ref) -> int:
        """Where a layer has the channels of a tensor."""
        axis = len(ref.shape) + channel_axis(self.modules[node.module])
        if axis < 1:
            raise Escape(f'{node.module} runs on a single picture without a batch')
        return axis

    def _sweep(self, number: int, stops: set[int]) -> Flow:
        start = self.record.nodes[number]
        out = start.outputs[0]
        if out.value in self.record.outputs:
            raise Escape('it is an output of the network')
        axis = self.axis(start, out)
        flow = Flow({out.value: along(axis, out.shape)}, Images(out))
        flow.passed[out.value] = ()
        pending = set(self.readers.get(out.value, []))
        while pending:
            here = min(pending)
            pending.discard(here)
            node = self.record.nodes[here]
            marked = [ref for ref in node.read if ref.value in flow.labels]
            passed = tuple(sorted({p for ref in marked for p in flow.passed[ref.value]}))
            try:
                if node.op == LAYER:
                    outputs, passed = self._layer(here, node, marked, flow, stops, passed)
                else:
                    outputs = step(node, flow.labels, self.record.constants)
                    self.scales.add(node, flow.labels, flow.scales)
                flow.images.step(node, self.record.constants)
            except NotPrivate as error:
                raise Escape(str(error), passed) from None
            for ref, labels in zip(node.outputs, outputs, strict=True):
                if labels is None or not np.any(labels >= 0):
                    continue
                if ref.value in self.record.outputs:
                    raise Escape('it reaches an output of the network', passed)
                flow.labels[ref.value] = labels
                flow.passed[ref.value] = passed
                pending.update(self.readers.get(ref.value, []))
        if not flow.consumers:
            raise Escape('no layer reads it')
        return flow

    def _layer(
        self,
        here: int,
        node: Node,
        marked: list[Ref],
        flow: Flow,
        stops: set[int],
        passed: tuple[int, ...],
    ) -> tuple[list[Optional[Labels]], tuple[int, ...]]:
        """A layer that reads the channels: a consumer, or a grouped one that hands them on."""
        name = node.module
        read = node.given
        if not isinstance(read, Ref) or read.value not in flow.labels or len(marked) != 1:
            raise NotPrivate(f'{name} reads it beside its input')
        fault = self.fault(name)
        if fault:
            raise NotPrivate(f'{name} reads it, and {fault}')
        axis = self.axis(node, read)
        labels = flow.labels[read.value]
        if any(size > 1 for d, size in enumerate(labels.shape) if d != axis):
            raise NotPrivate(f'{name} reads it across its channels')
        if not flow.images.first_in(read):
            raise NotPrivate(f'{name} reads its pictures in another order or shape')
        index = np.broadcast_to(labels.reshape(-1), (read.shape[axis],)).copy()
        groups = getattr(self.modules[name], 'groups', 1)
        if groups == 1 or here in stops:
            flow.merge_groups(index, groups) if groups > 1 else None
            if not np.array_equal(flow.consumers.setdefault(name, index), index):
                raise NotPrivate(f'{name} reads it in two ways')
            flow.reads.append(here)
            return [None for _ in node.outputs], passed
        grouped = index.reshape(groups, -1)
        if np.any((grouped < 0).any(axis=1) != (grouped < 0).all(axis=1)):
            raise Escape(f'{name} mixes it with other channels in a group', (*passed, here))
        flow.merge_groups(index, groups)
        out = node.outputs[0]
        index = np.repeat(grouped[:, 0], out.shape[axis] // groups)
        if not np.array_equal(flow.through.setdefault(name, index), index):
            raise NotPrivate(f'{name} reads it in two ways')
        return [index.reshape(along(axis, out.shape).shape)], (*passed, here)
