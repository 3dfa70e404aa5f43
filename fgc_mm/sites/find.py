# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding the sites of any network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Optional, Union

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map

from ..errors import UsageError
from .labels import Labels, NotPrivate, step
from .recorder import LAYER, Node, Record, Ref, record_pass
from .scales import Key, ScaleFinder
from .site import End, Refusal, Scale, Site
from .sources import find_source

Example = Union[Tensor, Sequence[Any], Mapping[str, Any]]

# Their forward is that of torch's own, around which they pad or look for empty inputs.
_WRAPPERS = (
    'mmcv.cnn.bricks.wrappers',
    'mmcv.cnn.bricks.conv2d_adaptive_padding',
    'timm.layers.conv2d_same',
    'timm.layers.linear',
)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a convolution or linear layer, of whatever kind: one node of a record."""
    return isinstance(module, (*_CONVS, nn.Linear))


def layer_fault(module: nn.Module) -> Optional[str]:
    """Why the channels of a layer cannot be switched, None if they can."""
    kind = type(module)
    if is_parametrized(module) or (
        getattr(module, '_forward_pre_hooks', None)
        and any(
            type(hook).__module__.startswith('torch.nn.utils')
            for hook in module._forward_pre_hooks.values()
        )
    ):
        return 'its weight is computed anew in every pass'
    own = kind.forward
    if own in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward, nn.Linear.forward):
        return None
    if own.__module__.startswith(_WRAPPERS):
        return None
    return f'{kind.__name__} uses its weight in a way of its own'


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
class _Flow:
    """How the channels of one call of a layer spread."""

    labels: dict[int, Labels]
    through: dict[str, np.ndarray] = field(default_factory=dict)
    consumers: dict[str, np.ndarray] = field(default_factory=dict)
    reads: list[tuple[int, str]] = field(default_factory=list)
    merged: dict[int, int] = field(default_factory=dict)
    passed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    scales: dict[Key, np.ndarray] = field(default_factory=dict)


class _Escape(Exception):
    def __init__(self, reason: str, passed: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.passed = passed


class Finder:
    """Finds sites in the record of a pass.

    Args:
        module (nn.Module): The network.
        record (Record): Its pass.
    """

    def __init__(self, module: nn.Module, record: Record) -> None:
        self.modules = dict(module.named_modules())
        self.record = record
        self.readers = record.readers()
        self.scales = ScaleFinder(module, record)
        self.calls: dict[str, list[int]] = {}
        self._followed: dict[str, tuple[dict[int, Labels], np.ndarray]] = {}
        self._inputs: dict[str, Ref] = {}
        for number, node in enumerate(record.nodes):
            if node.op == LAYER:
                self.calls.setdefault(node.module, []).append(number)

    def find(self) -> Found:
        """Follow every layer's output."""
        found = Found(first=next(iter(self.calls), ''))
        for name in self.calls:
            try:
                found.sites.append(self._site(name))
            except _Escape as escape:
                found.refused.append(Refusal(name, str(escape)))
        sites, found.sites = _with_factors(found.sites), []
        for site in sites:
            try:
                found.sites.append(replace(site, reads=self._reads(site, sites)))
            except _Escape as escape:
                found.refused.append(Refusal(site.name, str(escape)))
        return found

    # -- one layer -----------------------------------------------------------------------

    def _site(self, name: str) -> Site:
        layer = self.modules[name]
        fault = layer_fault(layer)
        if fault:
            raise _Escape(fault)
        if getattr(layer, 'groups', 1) > 1:
            raise _Escape('it is grouped: it is switched by the layer before it')
        width = layer.weight.shape[0]
        if width < 2:
            raise _Escape('it has a single channel')
        flows = [self._follow(number) for number in self.calls[name]]
        first = flows[0]
        for flow in flows[1:]:
            if flow.merged != first.merged or not (
                _same_ends(flow.consumers, first.consumers)
                and _same_ends(flow.through, first.through)
            ):
                raise _Escape('its calls are read by different layers')
        self._check_calls(name, first)
        decisions = _decisions(width, first.merged)
        count = int(decisions.max()) + 1
        if count < 2:
            raise _Escape('all of its channels belong together')
        source, axis, given = find_source(self.record, self.modules, name, self.calls[name])
        self._inputs[name] = given
        self._followed[name] = first.labels, decisions
        return Site(
            source=source,
            source_channels=given.shape[axis],
            producers=(_end(name, np.arange(width), decisions),),
            through=tuple(_end(n, index, decisions) for n, index in first.through.items()),
            consumers=tuple(_end(n, index, decisions) for n, index in first.consumers.items()),
            channels=count,
            axis=axis,
            calls=len(flows),
            scales=tuple(
                Scale(*key, _followed(index, decisions)) for key, index in first.scales.items()
            ),
        )

    def _reads(self, site: Site, sites: Sequence[Site]) -> tuple[End, ...]:
        """The sites whose channels a gate would read."""
        given, reads = self._inputs[site.name], []
        dim = site.axis % len(given.shape)
        for other in sites:
            labels, decisions = self._followed[other.name]
            if given.value not in labels:
                continue
            met = labels[given.value]
            if any(size > 1 for d, size in enumerate(met.shape) if d != dim):
                raise _Escape(f'its gate would read {other.name} across its channels')
            index = np.broadcast_to(met.reshape(-1), (given.shape[dim],))
            reads.append(_end(other.name, index, decisions))
        return tuple(reads)

    def _follow(self, number: int) -> _Flow:
        """Follow one call; a grouped convolution on the way is passed where that is possible."""
        stops: set[int] = set()
        while True:
            try:
                return self._sweep(number, stops)
            except _Escape as escape:
                if not escape.passed:
                    raise
                stops.add(escape.passed[-1])

    def _sweep(self, number: int, stops: set[int]) -> _Flow:
        nodes = self.record.nodes
        start = nodes[number]
        out = start.outputs[0]
        axis = self._axis(start, out)
        shape = [1] * len(out.shape)
        shape[axis] = out.shape[axis]
        flow = _Flow({out.value: np.arange(out.shape[axis]).reshape(shape)})
        flow.passed[out.value] = ()
        pending = set(self.readers.get(out.value, []))
        if out.value in self.record.outputs:
            raise _Escape('it is an output of the network')
        while pending:
            here = min(pending)
            pending.discard(here)
            node = nodes[here]
            marked = [ref for ref in node.inputs() if ref.value in flow.labels]
            passed = tuple(sorted({p for ref in marked for p in flow.passed[ref.value]}))
            try:
                outputs, passed = self._pass(here, node, marked, flow, stops, passed)
            except NotPrivate as error:
                raise _Escape(str(error), passed) from None
            for ref, labels in zip(node.outputs, outputs, strict=True):
                if labels is None or not np.any(labels >= 0):
                    continue
                if ref.value in self.record.outputs:
                    raise _Escape('it reaches an output of the network', passed)
                flow.labels[ref.value] = labels
                flow.passed[ref.value] = passed
                pending.update(self.readers.get(ref.value, []))
        if not flow.consumers:
            raise _Escape('no layer reads it')
        return flow

    def _axis(self, node: Node, ref: Ref) -> int:
        if isinstance(self.modules[node.module], nn.Linear):
            return len(ref.shape) - 1
        return len(ref.shape) - 1 - len(self.modules[node.module].kernel_size)

    def _pass(
        self,
        here: int,
        node: Node,
        marked: list[Ref],
        flow: _Flow,
        stops: set[int],
        passed: tuple[int, ...],
    ) -> tuple[list[Optional[Labels]], tuple[int, ...]]:
        if node.op != LAYER:
            outputs = step(node, flow.labels, self.record.constants)
            self.scales.add(node, flow.labels, flow.scales)
            return outputs, passed
        read = node.args[0] if node.args else next(iter(node.kwargs.values()))
        if not isinstance(read, Ref) or read.value not in flow.labels or len(marked) != 1:
            raise NotPrivate(f'{node.module} reads it beside its input')
        layer = self.modules[node.module]
        fault = layer_fault(layer)
        if fault:
            raise NotPrivate(f'{node.module} reads it, and {fault}')
        axis = self._axis(node, read)
        labels = flow.labels[read.value]
        if any(size > 1 for d, size in enumerate(labels.shape) if d != axis):
            raise NotPrivate(f'{node.module} reads it across its channels')
        index = np.broadcast_to(labels.reshape(-1), (read.shape[axis],)).copy()
        groups = getattr(layer, 'groups', 1)
        if groups == 1 or here in stops:
            if groups > 1:
                self._merge_groups(index, groups, flow)
            self._consume(here, node, index, flow)
            return [None for _ in node.outputs], passed
        grouped = index.reshape(groups, -1)
        if np.any((grouped < 0).any(axis=1) != (grouped < 0).all(axis=1)):
            raise _Escape(f'{node.module} mixes it with other channels in a group', (*passed, here))
        self._merge_groups(index, groups, flow)
        out = node.outputs[0]
        per_group = out.shape[axis] // groups
        index = np.repeat(grouped[:, 0], per_group)
        if node.module in flow.through and not np.array_equal(flow.through[node.module], index):
            raise NotPrivate(f'{node.module} reads it in two ways')
        flow.through[node.module] = index
        shape = [1] * len(out.shape)
        shape[axis] = out.shape[axis]
        return [index.reshape(shape)], (*passed, here)

    def _consume(self, here: int, node: Node, index: np.ndarray, flow: _Flow) -> None:
        known = flow.consumers.get(node.module)
        if known is not None and not np.array_equal(known, index):
            raise NotPrivate(f'{node.module} reads it in two ways')
        flow.consumers[node.module] = index
        flow.reads.append((here, node.module))

    @staticmethod
    def _merge_groups(index: np.ndarray, groups: int, flow: _Flow) -> None:
        for row in index.reshape(groups, -1):
            row = row[row >= 0]
            for label in row[1:]:
                _unite(flow.merged, int(row[0]), int(label))

    def _check_calls(self, name: str, flow: _Flow) -> None:
        """What is in between or behind is called once for each call of the layer."""
        times = len(self.calls[name])
        for other in (*flow.consumers, *flow.through):
            if len(self.calls[other]) != times:
                raise _Escape(f'{other} reads it in {times} of its {len(self.calls[other])} calls')
        if times == 1:
            return
        for other in (*flow.consumers, *flow.through):
            ahead = zip(self.calls[name], self.calls[other], strict=True)
            later = [*self.calls[name][1:], len(self.record.nodes)]
            for (mine, theirs), following in zip(ahead, later, strict=True):
                if not mine < theirs < following:
                    raise _Escape(f'{other} is called when the next decision has been made')


def _same_ends(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def _unite(merged: dict[int, int], a: int, b: int) -> None:
    a, b = _root(merged, a), _root(merged, b)
    if a != b:
        merged[max(a, b)] = min(a, b)


def _root(merged: dict[int, int], label: int) -> int:
    while label in merged:
        label = merged[label]
    return label


def _decisions(width: int, merged: dict[int, int]) -> np.ndarray:
    """For each channel the number of its decision."""
    roots = [_root(merged, label) for label in range(width)]
    number = {root: i for i, root in enumerate(dict.fromkeys(roots))}
    return np.array([number[root] for root in roots])


def _end(name: str, index: np.ndarray, decisions: np.ndarray) -> End:
    return End(name, _followed(index, decisions))


def _followed(index: np.ndarray, decisions: np.ndarray) -> Optional[tuple[int, ...]]:
    """For each channel of a layer or a tensor the decision it follows, None if they are equal."""
    followed = np.where(index >= 0, decisions[np.maximum(index, 0)], -1)
    plain = len(followed) == int(decisions.max()) + 1 and np.array_equal(
        followed, np.arange(len(followed))
    )
    return None if plain else tuple(int(i) for i in followed)


def _with_factors(sites: list[Site]) -> list[Site]:
    """Layers that make a factor of another site's channels, as those of squeeze-and-excitation do,
    are producers of that site: what a closed channel would be multiplied with is not needed."""
    kept: list[Site] = []
    for site in sites:
        ends = dict.fromkeys(site.consumers)
        host = next(
            (
                other
                for other in sites
                if other is not site
                and other.channels == site.channels
                and set(ends) <= set(other.consumers)
                and (set(ends) < set(other.consumers) or sites.index(other) < sites.index(site))
            ),
            None,
        )
        if host is None:
            kept.append(site)
    hosts = []
    for site in kept:
        factors = [
            other
            for other in sites
            if other not in kept
            and other.channels == site.channels
            and set(other.consumers) <= set(site.consumers)
        ]
        hosts.append(
            replace(
                site,
                producers=site.producers + tuple(p for f in factors for p in f.producers),
                through=site.through
                + tuple(t for f in factors for t in f.through if t not in site.through),
                scales=_together(site.scales, *(f.scales for f in factors)),
            )
        )
    return hosts


def _together(*scales: tuple[Scale, ...]) -> tuple[Scale, ...]:
    return tuple(dict.fromkeys(scale for several in scales for scale in several))


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
    args, kwargs = _call_of(example)
    found: Optional[Found] = None
    for training in modes:
        with _as_it_was(module, training):
            given = tree_map(_twice, (args, kwargs)) if training else (args, kwargs)
            record = record_pass(module, given[0], given[1], is_layer)
        mine = Finder(module, record).find()
        found = mine if found is None else both(found, mine)
    assert found is not None
    return found


def _call_of(example: Example) -> tuple[tuple, dict]:
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
            sites.append(replace(site, scales=_together(site.scales, other.scales)))
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
    """Run a network in another mode; modes, buffers and random numbers are put back."""
    modes = {part: part.training for part in module.modules()}
    buffers = {b: b.detach().clone() for b in module.buffers()}
    with torch.random.fork_rng():
        try:
            for part in modes:
                part.training = False
            if training:
                module.train()
            yield
        finally:
            for part, mode in modes.items():
                part.training = mode
            with torch.no_grad():
                for buffer, before in buffers.items():
                    buffer.copy_(before)
