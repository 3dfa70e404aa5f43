# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which of the ways to run a block is the fastest here: they are tried on the first pictures."""

from __future__ import annotations

from typing import Optional

import numpy as np

from .frozen_pass import Opened

WAYS = ('dense', 'fixed', 'gathered', 'each')
"""Everything computed and masked; what the first pictures opened, laid out once; what this picture
or batch opens; image by image."""
_TRIES = 4
_LEARNED = 10
"""Pictures or batches after which it is known what the first ones opened."""


class Ways:
    """Chooses how the sites of a block are run: every way is timed a few times at each size of the
    input, then the fastest is kept."""

    def __init__(self, way: str, timed: bool = True) -> None:
        self.way = way
        self.timed = timed
        self.each: Optional[bool] = False  # whether images can be run one by one; None: try it
        self.best: dict[tuple, str] = {}
        self._times: dict[tuple, dict[str, list[float]]] = {}
        self.learns = way == 'auto' and timed
        self._passes = 0
        self._seen: dict[str, np.ndarray] = {}
        self._fixed: dict[str, np.ndarray] = {}

    def choose(self, size: tuple) -> tuple[str, bool]:
        """The way to go, and whether to tell the time it takes; the size begins with the number of
        images."""
        each = bool(self.each) and size[0] > 1
        if self.way != 'auto' or not self.timed:
            way = ('each' if each else 'gathered') if self.way in ('auto', 'each') else self.way
            return way, False
        best = self.best.get(size)
        if best is not None:
            return best, False
        self._passes += 1
        if self._passes == _LEARNED:
            self.learns = False
            self._fixed = {site: mask for site, mask in self._seen.items() if not mask.all()}
        offers = [
            'gathered',
            'dense',
            *(['each'] if each else []),
            *(['fixed'] if self._fixed else []),
        ]
        times = self._times.setdefault(size, {})
        way = min(offers, key=lambda way: len(times.setdefault(way, [])))
        if len(times[way]) < _TRIES:
            return way, True
        best = min(times, key=lambda way: min(times[way]))  # what else the machine does adds only
        if self._passes > _LEARNED:
            self.best[size] = best
        return best, False

    def tell(self, size: tuple, way: str, seconds: float) -> None:
        """How long a way took."""
        self._times[size][way].append(seconds)

    def learn(self, site: str, values: np.ndarray) -> None:
        """What one of the first pictures opened."""
        self._seen[site] = self._seen.get(site, False) | (values != 0).any(axis=0)

    def opened(self, site: str, values: np.ndarray, way: str, step: int) -> Opened:
        """What to compute of a site."""
        if way == 'dense':
            return Opened(values)
        mask = values[0] != 0 if len(values) == 1 else (values != 0).any(axis=0)
        known = self._fixed.get(site) if way == 'fixed' else None
        if known is not None and not (mask & ~known).any():
            return Opened(values, known, True, step)
        return Opened(values, mask, False, step)
