# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Blocks of a frozen network: where it is decided, and where it is tried what can be left out."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Optional

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from ..sites.unseen import tensors_in
from .decisions import Decisions
from .frozen_pass import Pass
from .ways import Values, Ways, groups

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class SourceForward:
    """``forward`` of a module on whose input gates decide.

    Args:
        inner (Callable): Its forward.
        state (Pass): Of the network.
        decide (Decisions): Its gates.
        ways (Ways): Chooses how to run.
        encloses (bool): Whether producers and consumers are inside.
    """

    def __init__(
        self, inner: Callable, state: Pass, decide: Decisions, ways: Ways, encloses: bool
    ) -> None:
        self.inner = inner
        self.state = state
        self.decide = decide
        self.ways = ways
        self.encloses = encloses
        self.name = ' '.join(decide.gates)
        self.gathered: set[str] = set()
        self.masked: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if not self.encloses:
            self._tell()
        values = self.decide(x, state.opened)
        gathered = self.gathered
        if state.trial is not None:
            values = {site: self._drawn(site, value) for site, value in values.items()}
            gathered = (state.gathered & values.keys()) - self.masked
        if state.original or not gathered or not len(x):
            state.opened.update(self.ways.opened('dense', values))
            return self.inner(*args, **kwargs)
        mine = {site: values.pop(site) for site in gathered} if len(gathered) < len(values) else {}
        if mine:  # some are masked
            state.opened.update(self.ways.opened('dense', values))
            values = mine
        way, key = 'each' if state.each else 'gathered', None
        if state.trial is None:
            way, key = self.ways.choose(values, _positions(x, self.decide.axis))
        if way == 'each':
            parts = groups(values)
            if len(parts) > 1:
                start = perf_counter()
                out = self._parts(parts, values, args, kwargs)
                if key is not None:
                    self.ways.tell(key, perf_counter() - start)
                return out
            way = 'gathered'
        start = perf_counter() if key is not None else 0.0
        state.opened.update(self.ways.opened(way, values))
        if key is not None and not self.encloses:
            state.clocks.update(dict.fromkeys(values, start))
            state.waiting[self.name] = key, start, list(values)
        out = self.inner(*args, **kwargs)
        if key is not None and self.encloses:
            self.ways.tell(key, perf_counter() - start)
        return out

    def _tell(self) -> None:
        """How long the pass before took from here to the last consumer."""
        waiting = self.state.waiting.pop(self.name, None)
        if waiting is not None:
            key, start, sites = waiting
            end = max(self.state.clocks.pop(site, start) for site in sites)
            if end > start:
                self.ways.tell(key, end - start)

    def _drawn(self, site: str, value: np.ndarray) -> np.ndarray:
        """Decisions for a trial, others for each image; those of the gate outside of it."""
        trial = self.state.trial
        assert trial is not None
        if site not in trial:
            return value
        draw = np.random.RandomState(zlib.crc32(site.encode()))
        return draw.rand(*value.shape) < 0.5

    def _parts(self, parts: Sequence[list[int]], values: Values, args: tuple, kwargs: dict) -> Any:
        """Images with equal decisions together, the outputs in their order."""
        count = len(next(iter(values.values())))
        outs = []
        for images in parts:
            index = torch.tensor(images)
            own = {site: value[images] for site, value in values.items()}
            self.state.opened.update(self.ways.opened('gathered', own))
            taken = tree_map(lambda v, i=index: _take(v, i, count), (args, kwargs))
            outs.append(self.inner(*taken[0], **taken[1]))
        order = torch.tensor([image for images in parts for image in images]).argsort()
        if isinstance(outs[0], Tensor):
            return _join(outs, order)
        return type(outs[0])(_join(several, order) for several in zip(*outs, strict=True))


def _positions(x: Tensor, axis: int) -> int:
    return x.numel() // max(x.size(0) * x.size(axis), 1)


def _take(value: Any, index: Tensor, count: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count:
        return value
    return value.index_select(0, index.to(value.device))


def _join(outs: Sequence[Tensor], order: Tensor) -> Tensor:
    return torch.cat(list(outs)).index_select(0, order.to(outs[0].device))


class RegionForward:
    """``forward`` of the smallest module with all layers of some sites inside: at its first call
    it tries, with decisions drawn at random, whether their closed channels can be left out.

    Args:
        inner (Callable): Its forward.
        state (Pass): Of the network.
        inside (Sequence[nn.Module]): Modules inside.
        groups (Sequence[set[str]]): The sites, those together that share a layer.
        settle (Callable): Is told a site and the reason why it stays masked, or None.
        source (SourceForward, optional): If the region is a source whose images can be
            run one by one, as far as one can see. Defaults to None.
    """

    def __init__(
        self,
        inner: Callable,
        state: Pass,
        inside: Sequence[nn.Module],
        groups: Sequence[set[str]],
        settle: Callable[[str, Optional[str]], None],
        source: Optional[SourceForward] = None,
    ) -> None:
        self.inner = inner
        self.state = state
        self.inside = list(inside)
        self.groups = list(groups)
        self.settle = settle
        self.source = source
        self.pending = True
        self.folds = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        if state.original or state.trial is not None:
            return self.inner(*args, **kwargs)
        if self.pending and _images(args, kwargs):
            self.pending = False
            with without_hooks(self.inside):
                self.inner(*args, **kwargs)  # regions inside of this one come first
                self._try(args, kwargs)
        if self.folds:
            return self.inner(*args, **kwargs)
        state.original = True
        try:
            return self.inner(*args, **kwargs)
        finally:
            state.original = False

    def _try(self, args: tuple, kwargs: dict) -> None:
        together = set().union(*self.groups)
        wanted = self._run(together, args, kwargs, original=True)
        if self._fault(together, set(), args, kwargs, wanted):
            self.folds = False
            for site in together:
                self.settle(site, 'its region differs with norms folded in')
            return
        good = together
        if self._fault(together, together, args, kwargs, wanted):
            good = set()
            for group in self.groups:
                fault = self._fault(together, good | group, args, kwargs, wanted)
                if fault is None:
                    good |= group
                    continue
                for site in group:
                    self.settle(site, fault)
        for site in good:
            self.settle(site, None)
        if self.source is not None and good == together:
            count = _images(args, kwargs)
            args, kwargs = tree_map(lambda v: _twice(v, count), (args, kwargs))
            try:
                wanted = self._run(together, args, kwargs, original=True)
                fault = self._fault(together, together, args, kwargs, wanted, each=True)
                self.source.ways.each = fault is None
            except Exception:
                self.source.ways.each = False

    def _fault(
        self,
        sites: set[str],
        gathered: set[str],
        args: tuple,
        kwargs: dict,
        wanted: list[Tensor],
        each: bool = False,
    ) -> Optional[str]:
        """Why closed channels cannot be left out, None if they can."""
        try:
            found = self._run(sites, args, kwargs, gathered=gathered, each=each)
        except Exception as error:
            return f'{type(error).__name__} without its closed channels: {error}'.split('\n')[0]
        if len(found) != len(wanted):
            return 'it returns something else without its closed channels'
        for have, want in zip(found, wanted, strict=True):
            if have.shape != want.shape:
                return 'it returns another shape without its closed channels'
            if have.numel() and have.dtype in _TOLERANCE:
                limit = _TOLERANCE[have.dtype] * max(float(want.abs().max()), 1e-12)
                if not float((have.float() - want.float()).abs().max()) <= limit:
                    return 'it returns other values without its closed channels'
        return None

    @torch.no_grad()
    def _run(
        self,
        sites: set[str],
        args: tuple,
        kwargs: dict,
        gathered: frozenset | set = frozenset(),
        each: bool = False,
        original: bool = False,
    ) -> list[Tensor]:
        state = self.state
        args, kwargs = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, (args, kwargs))
        state.trial, state.gathered = set(sites), set(gathered)
        state.original, state.each = original, each
        try:
            out = self.inner(*args, **kwargs)
        finally:
            state.trial, state.gathered = None, set()
            state.original = state.each = False
        return tensors_in(out)


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """No hook of some modules is called."""
    names = ('_forward_pre_hooks', '_forward_hooks')
    before = [(m, [m.__dict__[name] for name in names]) for m in modules]
    for module, _ in before:
        module.__dict__.update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        for module, hooks in before:
            module.__dict__.update(zip(names, hooks, strict=True))


def _images(args: tuple, kwargs: dict) -> int:
    """Size of the batch, 0 if there is none."""
    for value in tree_flatten((args, kwargs))[0]:
        if isinstance(value, Tensor):
            return len(value) if value.numel() else 0
    return 0


def _twice(value: Any, count: int) -> Any:
    """The first image as a batch of two."""
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count:
        return value
    return torch.cat([value[:1], value[:1]])
