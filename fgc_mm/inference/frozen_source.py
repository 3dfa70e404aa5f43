# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Blocks of a frozen network: where it is decided, and where it is tried what can be left out."""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Optional

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..sites.unseen import tensors_in
from .decisions import Decisions
from .frozen_pass import Pass
from .ways import Ways

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class SourceForward:
    """``forward`` of a module on whose input gates decide, about what is computed."""

    def __init__(
        self,
        inner: Callable,
        state: Pass,
        decide: Decisions,
        ways: Mapping[str, Ways],
        steps: Mapping[str, int],
    ) -> None:
        self.inner = inner
        self.state = state
        self.decide = decide
        self.ways = ways
        self.steps = steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        values = self.decide(x, state.opened)
        for site in values.keys() & state.trial:
            draw = np.random.RandomState(zlib.crc32(site.encode()))
            values[site] = draw.rand(*values[site].shape) < 0.5
        count = len(x)
        if count < 2 or 'each' not in [state.way.get(site) for site in values]:
            self._open(values)
            return self.inner(*args, **kwargs)
        outs = []
        for i in range(count):
            self._open({site: value[i : i + 1] for site, value in values.items()})
            own = tree_map(
                lambda v, i=i: v[i : i + 1] if _images(v) == count else v, (args, kwargs)
            )
            outs.append(tree_flatten(self.inner(*own[0], **own[1])))
        tensors = [torch.cat(several) for several in zip(*(flat for flat, _ in outs), strict=True)]
        return tree_unflatten(tensors, outs[0][1])

    def _open(self, values: Mapping[str, np.ndarray]) -> None:
        state = self.state
        for site, value in values.items():
            if self.ways[site].learns and not state.trial:
                self.ways[site].learn(site, value)
            way = 'dense' if state.original or not len(value) else state.way.get(site, 'dense')
            state.opened[site] = self.ways[site].opened(site, value, way, self.steps[site])


class RegionForward:
    """``forward`` of the smallest module with all layers of some sites inside.

    At its first call it tries, with decisions drawn at random, whether their closed channels
    can be left out, and tells the ``reasons`` why not; at the next ones, in which of the ways it is
    the fastest. Of those that ``follow`` is computed what other sites say.
    """

    def __init__(
        self,
        inner: Callable,
        state: Pass,
        inside: Sequence[nn.Module],
        sites: set[str],
        follows: set[str],
        ways: Ways,
        reasons: dict[str, Optional[str]],
    ) -> None:
        self.inner = inner
        self.state = state
        self.inside = list(inside)
        self.sites = sites
        self.follows = follows
        self.ways = ways
        self.reasons = reasons
        self.pending = True
        self.folds = True
        self.gathered: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, ways = self.state, self.ways
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            x = next((v for v in tree_flatten((args, kwargs))[0] if isinstance(v, Tensor)), None)
        if state.original or state.trial or x is None or not x.numel():
            return self.inner(*args, **kwargs)
        if self.pending:
            self.pending = False
            with without_hooks(self.inside):
                self.inner(*_copied(args), **_copied(kwargs))  # regions inside come first
                self._try(args, kwargs)
        if not self.folds:
            state.original = True
            try:
                return self.inner(*args, **kwargs)
            finally:
                state.original = False
        count = len(x)
        if ways.each is None and count > 1:
            ways.each = False
            with without_hooks(self.inside):
                wanted = self._run(self.gathered, args, kwargs, original=True)
                fault = self._fault(self.gathered, args, kwargs, wanted, 'each')
            ways.each = fault is None
        # Twice as many positions or half as many are another size, what lies between is not.
        size = (count, round(math.log2(x.numel() / count)))
        way, timed = ways.choose(size)
        for site in self.gathered:
            state.way[site] = way
        if not timed:
            return self.inner(*args, **kwargs)
        start = perf_counter()
        out = self.inner(*args, **kwargs)
        ways.tell(size, way, perf_counter() - start)
        return out

    def _try(self, args: tuple, kwargs: dict) -> None:
        wanted = self._run(set(), args, kwargs, original=True)
        good = self.sites
        if self._fault(good, args, kwargs, wanted):
            good = set()
            for site in sorted(self.sites):
                self.reasons[site] = self._fault(good | {site}, args, kwargs, wanted)
                good = good if self.reasons[site] else good | {site}
        if not good and self._fault(good, args, kwargs, wanted):
            self.folds = False
        self.reasons.update(dict.fromkeys(good))
        self.gathered = good - self.follows
        if good != self.sites:
            self.ways.each = False

    def _fault(
        self,
        gathered: set[str],
        args: tuple,
        kwargs: dict,
        wanted: list[Tensor],
        way: str = 'gathered',
    ) -> Optional[str]:
        """Why closed channels cannot be left out, None if they can."""
        try:
            found = self._run(gathered, args, kwargs, way)
        except Exception as error:
            return f'{type(error).__name__} without its closed channels: {error}'.split('\n')[0]
        if [have.shape for have in found] != [want.shape for want in wanted]:
            return 'it returns other shapes without its closed channels'
        for have, want in zip(found, wanted, strict=True):
            if have.numel() and have.dtype in _TOLERANCE:
                limit = _TOLERANCE[have.dtype] * max(float(want.abs().max()), 1e-12)
                if not float((have.float() - want.float()).abs().max()) <= limit:
                    return 'it returns other values without its closed channels'
        return None

    @torch.no_grad()
    def _run(
        self,
        gathered: set[str],
        args: tuple,
        kwargs: dict,
        way: str = 'gathered',
        original: bool = False,
    ) -> list[Tensor]:
        """What it returns with decisions drawn at random, some sites run in a way."""
        state = self.state
        state.way.update(dict.fromkeys(self.sites, 'dense'))
        state.way.update(dict.fromkeys(gathered - self.follows, way))
        state.trial, state.original = self.sites, original
        try:
            return tensors_in(self.inner(*_copied(args), **_copied(kwargs)))
        finally:
            state.trial, state.original = set(), False


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


def _copied(values: Any) -> Any:
    """The same with other tensors, for what may work in place."""
    return tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, values)


def _images(value: Any) -> int:
    return len(value) if isinstance(value, Tensor) and value.dim() else 0
