# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A network prepared for inference, which computes open channels only."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import UsageError
from ..gates import Gate
from ..sites import Site
from ..sites.find import Example, call_of
from ..sites.forward_hooks import Decide, Mask
from ..sites.layers import is_layer, layer_fault
from ..sites.recorder import ExampleError, Record, record_pass
from .decisions import Decisions
from .folds import Fold, find_folds
from .frozen_layer import ActivationForward, LayerForward, ScaledForward, SkippedForward
from .frozen_pass import Pass, Side
from .frozen_sites import factors_of, paths_of, region_of, sites_of, step_of, within
from .frozen_source import RegionForward, SourceForward, without_hooks
from .memory import to_contiguous
from .ways import WAYS, Ways


def freeze(
    network: nn.Module,
    example: Optional[Example] = None,
    way: str = 'auto',
    channels_last: bool = True,
) -> nn.Module:
    """A copy of a network that is prepared for inference and computes open channels only.

    Norms are folded into the layers before them and weights are laid out, once: later
    changes of weights are not seen. Results are those of the gated network up to rounding.
    For each site it is tried, at the first picture, whether its closed channels can be left
    out; where not, it stays masked. At the first pictures each block is run in several ways, and
    the fastest is kept.

    Args:
        network (nn.Module): A network with gates on sites, or any model with one inside; it is
            left as it is.
        example (Tensor | Sequence | Mapping, optional): What to call it with to prepare it at
            once. Defaults to None, which leaves that to the first pictures.
        way (str): How blocks are run: 'gathered' (what a picture opens), 'each' (in a batch picture
            by picture), 'dense' (masked), or 'auto', whatever is fastest. Defaults to 'auto'.
        channels_last (bool): Compute in channels-last layout, which suits odd numbers of
            channels; the layout of the outputs is the usual one. Defaults to True.

    Returns:
        nn.Module: The copy, in evaluation mode.

    Raises:
        UsageError: If ``way`` is another, or the network cannot be run on the example.

    Example:
        >>> fast = freeze(net)
        >>> with torch.no_grad():
        ...     outs = fast(torch.rand(1, 3, 512, 512))
        >>> print(frozen_report(fast))
    """
    frozen = copy.deepcopy(network)
    frozen.eval()
    frozen.requires_grad_(False)
    freezer = Freezer(frozen, way, channels_last)
    freezer.attach()
    if example is not None:
        args, kwargs = call_of(example)
        with torch.no_grad():
            frozen(*args, **kwargs)
    return frozen


def frozen_report(network: nn.Module) -> FrozenReport:
    """What runs how in a network that :func:`freeze` made, as far as pictures have shown.

    Raises:
        UsageError: If it is none.
    """
    forward = network.__dict__.get('forward')
    if not isinstance(forward, RootForward):
        raise UsageError(
            f'{type(network).__name__} is not frozen; use what freeze(network) returns'
        )
    return forward.freezer.report


@dataclass
class FrozenReport:
    """What runs how in a frozen network.

    Attributes:
        sites (dict): Site -> None if its closed channels are left out, else why they are masked.
        norms (int): Norms that are folded into layers.
        blocks (dict): Module -> its :class:`~fgc_mm.inference.ways.Ways`.
    """

    sites: dict[str, Optional[str]] = field(default_factory=dict)
    norms: int = 0
    blocks: dict[str, Ways] = field(default_factory=dict)

    @property
    def gathered(self) -> list[str]:
        """The sites whose closed channels are left out."""
        return [site for site, reason in self.sites.items() if reason is None]

    @property
    def masked(self) -> dict[str, str]:
        """The others, with the reason."""
        return {site: reason for site, reason in self.sites.items() if reason is not None}

    def __str__(self) -> str:
        lines = [
            f'{len(self.gathered)} of {len(self.sites)} sites without their closed channels, '
            f'{self.norms} norms folded'
        ]
        lines += [f'{site}: masked, {reason}' for site, reason in self.masked.items()]
        for block, ways in self.blocks.items():
            chosen = [f'{way} at {n} x 2^{size}' for (n, size), way in ways.best.items()]
            lines += [f'{block}: {", ".join(chosen)}'] if chosen else []
        return '\n'.join(lines)


class Freezer:
    """Prepares a network in place, see :func:`freeze`, and takes that back."""

    def __init__(self, network: nn.Module, way: str = 'auto', channels_last: bool = True) -> None:
        ways = ('auto', *(w for w in WAYS if w != 'fixed'))
        if way not in ways:
            raise UsageError(f'freeze: way={way!r} must be one of {ways}')
        self.network = network
        self.way = way
        self.channels_last = channels_last
        self.state = Pass()
        self.report = FrozenReport()
        self.ready = False
        self._root: Optional[RootForward] = None
        self._lock = threading.RLock()
        self._before: list[tuple[nn.Module, Any]] = []
        self._hooks: list[tuple[nn.Module, dict, dict]] = []

    def attach(self) -> None:
        """Wait for the first picture."""
        root = RootForward(self, _forward_of(self.network))
        self._before.append((self.network, self.network.__dict__.get('forward')))
        self.network.__dict__['forward'] = self._root = root

    def remove(self) -> None:
        """The network as it was."""
        for module, forward in reversed(self._before):
            module.__dict__.pop('forward', None)
            if forward is not None:
                module.__dict__['forward'] = forward
        for module, hooks, flags in self._hooks:
            now = module._forward_pre_hooks
            kept = {i: h for i, h in hooks.items() if i in now or isinstance(h, (Decide, Mask))}
            after = {**kept, **now}  # in their places, and what came since
            now.clear()
            now.update(after)
            module._forward_pre_hooks_with_kwargs.update(flags)
        self._before, self._hooks, self._root, self.ready = [], [], None, False

    def prepare(self, args: tuple, kwargs: dict) -> None:
        """Prepare the network for what it is called with, once."""
        with self._lock:
            if self.ready:
                return
            modules: dict[str, Any] = dict(self.network.named_modules())
            record: Optional[Record] = None  # of a pass without gates
            self.state.recorded = True
            with without_hooks(modules.values()), suppress(ExampleError):
                record = record_pass(self.network, args, kwargs, is_layer)
            self.state.recorded = False
            folds = find_folds(record, modules) if record else {}
            sites = sites_of(modules)
            self.report.sites = dict.fromkeys(sites, 'its region has not run')
            self._take_hooks(modules)
            sides = Sides(sites)
            self._layers(modules, sides, folds)
            self._scales(modules, sites, folds)
            self._blocks(modules, sites, sides, record)
            if self.channels_last:  # for the network itself, not for the heads around it
                network = modules[_inner_of(modules)]
                self._replace(network, LayoutForward(self._forward_of(network)))
            self.ready = True

    def _forward_of(self, module: nn.Module) -> Any:
        """What is called in a module now."""
        root = self._root
        return root.inner if root and module is self.network else _forward_of(module)

    def _replace(self, module: nn.Module, forward: Any) -> None:
        if self._root is not None and module is self.network:
            self._root.inner = forward  # other threads wait in there
            return
        self._before.append((module, module.__dict__.get('forward')))
        module.__dict__['forward'] = forward

    def _take_hooks(self, modules: dict[str, Any]) -> None:
        """Decisions and masks are made elsewhere from now on."""
        for module in modules.values():
            hooks, flags = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
            taken = [i for i, hook in hooks.items() if isinstance(hook, (Decide, Mask))]
            if taken:
                self._hooks.append((module, dict(hooks), {i: flags[i] for i in taken}))
            for i in taken:
                del hooks[i], flags[i]

    def _layers(self, modules: dict[str, Any], sides: Sides, folds: Mapping[str, Fold]) -> None:
        inner = _inner_of(modules)
        acts: set[nn.Module] = set()
        for name, layer in modules.items():
            if not is_layer(layer) or layer_fault(layer) or 'forward' in layer.__dict__:
                continue
            fold = folds.get(name, Fold())
            reads = Side(sides.ins[name], reads=True) if name in sides.ins else None
            makes = Side(sides.outs[name]) if name in sides.outs else None
            if isinstance(layer, nn.Linear) and not (reads or makes or fold.norm):
                continue
            norm, act = (modules[part] if part else None for part in (fold.norm, fold.act))
            last = self.channels_last and within(name, inner)
            self._replace(
                layer, LayerForward(layer, self.state, norm, act, reads, makes, last, fold.adds)
            )
            if norm is not None:
                self._replace(norm, SkippedForward(norm, self.state))
                self.report.norms += 1
            acts.update([] if act is None else [act])
        for act in acts:
            self._replace(act, ActivationForward(act, self.state))

    def _scales(self, modules: dict[str, Any], sites: SitesOf, folds: Mapping[str, Fold]) -> None:
        folded = {fold.norm for fold in folds.values()}
        found: dict[str, dict[str, tuple[int, list]]] = {}
        for name, (site, _) in sites.items():
            for scale in site.scales:
                owner, _, tensor = scale.tensor.rpartition('.')
                if owner not in folded:
                    ends = found.setdefault(owner, {}).setdefault(tensor, (scale.dim, []))[1]
                    ends.append((name, scale.index))
        for owner, tensors in found.items():
            follows = {tensor: (dim, Side(ends)) for tensor, (dim, ends) in tensors.items()}
            module = modules[owner]
            self._replace(
                module, ScaledForward(module, self._forward_of(module), self.state, follows)
            )

    def _blocks(
        self, modules: dict[str, Any], sites: SitesOf, sides: Sides, record: Optional[Record]
    ) -> None:
        called = {call.module for call in record.calls} if record else None
        device = next((p.device.type for p in self.network.parameters()), 'cpu')
        regions: dict[str, set[str]] = {}
        ways: dict[str, Ways] = {}
        for name, (site, _) in sites.items():
            region = region_of(site, modules, called)
            regions.setdefault(region, set()).add(name)
            own = Ways(self.way, device == 'cpu')
            ways[name] = self.report.blocks.setdefault(region, own)
        by_source: dict[tuple[str, int], list[str]] = {}
        for name, (site, _) in sites.items():
            by_source.setdefault((site.source, site.axis), []).append(name)
        is_read = {end.module for site, _ in sites.values() for end in site.reads}
        steps = {
            name: step_of(name, site, modules, sides.ins, sides.outs, name in is_read)
            for name, (site, _) in sites.items()
        }
        for (source, axis), decided in by_source.items():
            gates = {name: sites[name][1] for name in decided}
            read = [end for end in sites[decided[0]][0].reads if end.module in sites]
            side = Side([(end.module, end.index) for end in read]) if read else None
            decide = Decisions(gates, axis, side)
            module = modules[source]
            self._replace(
                module, SourceForward(self._forward_of(module), self.state, decide, ways, steps)
            )
        for region, names in regions.items():
            # Images can be run one by one if nothing else is decided in there.
            others = [site for name, (site, _) in sites.items() if name not in names]
            inside = [source for source, _ in by_source if within(source, region)]
            if inside == [region] and not any(
                within(path, region) for site in others for path in paths_of(site)
            ):
                self.report.blocks[region].each = None  # it is tried
            module = modules[region]
            parts = [part for part in modules.values() if part is not module]  # and gates
            own = self.report.blocks[region]
            forward = RegionForward(
                self._forward_of(module),
                self.state,
                parts,
                names,
                names & sides.follow,
                own,
                self.report.sites,
            )
            self._replace(module, forward)

    def __getstate__(self) -> dict:
        return {**self.__dict__, '_lock': None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, _lock=threading.RLock())


SitesOf = Mapping[str, tuple[Site, Gate]]


class Sides:
    """Which sites the inputs and outputs of layers follow, and the sites that only ``follow``."""

    def __init__(self, sites: SitesOf) -> None:
        self.ins: dict[str, list] = {}
        self.outs: dict[str, list] = {}
        self.follow: set[str] = set()
        for name, (site, _) in sites.items():
            for end in (*site.producers, *site.through):
                self.outs.setdefault(end.module, []).append((name, end.index))
            for end in site.consumers:
                self.ins.setdefault(end.module, []).append((name, end.index))
        for name, (site, _) in sites.items():
            others = factors_of(name, site, self.ins)
            if others:
                self.outs[name] = others
                self.follow.add(name)


class RootForward:
    """``forward`` of a frozen network: prepares it before its first picture."""

    def __init__(self, freezer: Freezer, inner: Any) -> None:
        self.freezer = freezer
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        freezer = self.freezer
        if not (freezer.ready or freezer.state.recorded):
            freezer.prepare(args, kwargs)
        return self.inner(*args, **kwargs)


class LayoutForward:
    """``forward`` of a network that computes in channels-last layout."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(_usual, self.inner(*map(_channels_last, args), **kwargs))


def _channels_last(value: Any) -> Any:
    maps = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if maps else value


def _usual(value: Any) -> Any:
    # Some ops that come later, such as RoIAlign, take the layout for granted.
    return to_contiguous(value) if isinstance(value, Tensor) and value.dim() == 4 else value


def _forward_of(module: nn.Module) -> Any:
    return module.__dict__.get('forward') or partial(type(module).forward, module)


def _inner_of(modules: Mapping[str, nn.Module]) -> str:
    """The network itself, without the heads around it."""
    return 'backbone' if 'backbone' in modules else ''
