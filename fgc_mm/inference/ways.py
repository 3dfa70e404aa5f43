# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which of the ways to run a block is the fastest here: they are tried on the first pictures."""

from __future__ import annotations

import math
from typing import Optional

import numpy as np

from .frozen_pass import Kept, Opened

WAYS = ('dense', 'fixed', 'gathered', 'each')
"""Everything computed and masked; what the first pictures opened, laid out once; what this picture
or batch opens; image by image."""
_TRIES = 4
_LEARNED = 10
"""Passes after which it is known what the first pictures opened."""

Values = dict[str, np.ndarray]


class Ways:
    """Chooses how the sites of a source are run.

    Every way is timed a few times at each kind of input (its size, and how much is open), then
    the fastest is kept.

    Args:
        way (str): One of :data:`WAYS`, or 'auto'.
        times (bool): Whether time can be measured where it runs. Defaults to True.
    """

    def __init__(self, way: str, times: bool = True) -> None:
        self.way = way
        self.times = times
        self.each = False  # whether images can be run one by one
        self.known: dict[tuple, dict[str, list[float]]] = {}
        self.best: dict[tuple, str] = {}
        self.seen: Values = {}
        self.passes = 0
        self.fixed: dict[str, Kept] = {}

    def choose(self, values: Values, positions: int) -> tuple[str, Optional[tuple]]:
        """The way to go, and under which key to tell the time it took, None if it is known.

        Args:
            values (dict): Site -> B x decisions.
            positions (int): Positions of the input.
        """
        opened = [value != 0 for value in values.values()]
        images = len(opened[0])
        total = sum(mask.size for mask in opened)
        share = sum(map(np.count_nonzero, opened)) / total
        if share == 1:
            return 'dense', None
        if self.way != 'auto':
            alone = self.way == 'each' and not self._can_each(images)
            return 'gathered' if alone else self.way, None
        if not self.times:
            return ('each' if self._can_each(images) else 'gathered'), None
        together = share
        if images > 1:
            united = [mask.any(axis=0) for mask in opened]
            together = sum(map(np.count_nonzero, united)) * images / total
        key = (images, round(2 * math.log2(positions)), round(8 * share), round(8 * together))
        fits = self._learn(values)
        best = self.best.get(key)
        if best is not None:
            return (best if best != 'fixed' or fits else 'gathered'), None
        tried = self.known.setdefault(key, {})
        for way in self._offered(images, fits):
            tried.setdefault(way, [])
        least = min(tried, key=lambda way: len(tried[way]) if way != 'fixed' or fits else _TRIES)
        if len(tried[least]) < _TRIES and (least != 'fixed' or fits):
            return least, (key, least)
        best = min(tried, key=lambda way: min(tried[way], default=math.inf))
        if self.passes >= _LEARNED:
            self.best[key] = best
        return (best if best != 'fixed' or fits else 'gathered'), None

    def tell(self, key: tuple, seconds: float) -> None:
        """How long a way took."""
        where, way = key
        self.known[where].setdefault(way, []).append(seconds)

    def _can_each(self, images: int) -> bool:
        return self.each and images > 1

    def _offered(self, images: int, fits: bool) -> list[str]:
        found = ['gathered', 'dense']
        if self._can_each(images):
            found.append('each')
        if fits:
            found.append('fixed')
        return found

    def _learn(self, values: Values) -> bool:
        """Learn what pictures open; whether that is something, and these fit."""
        self.passes += 1
        if self.passes <= _LEARNED:
            for site, value in values.items():
                opened = (value != 0).any(axis=0)
                self.seen[site] = self.seen.get(site, False) | opened
            if self.passes == _LEARNED and not all(mask.all() for mask in self.seen.values()):
                self.fixed = {site: Kept(mask, fixed=True) for site, mask in self.seen.items()}
        return bool(self.fixed) and not any(
            ((value != 0).any(axis=0) & ~self.fixed[site].mask).any()
            for site, value in values.items()
        )

    def opened(self, way: str, values: Values) -> dict[str, Opened]:
        """Site -> what to compute, for one of the ways or a part of a batch."""
        if way == 'dense':
            return {site: Opened(v, None, bool((v == 1).all())) for site, v in values.items()}
        found = {}
        for site, value in values.items():
            kept = self.fixed.get(site) if way == 'fixed' else None
            if kept is None:
                mask = value[0] != 0 if len(value) == 1 else (value != 0).any(axis=0)
                kept = Kept(mask) if not mask.all() else None
            own = value if kept is None else value[:, kept.mask]
            found[site] = Opened(value, kept, bool((own == 1).all()))
        return found


def groups(values: Values) -> list[list[int]]:
    """The images of a batch, those with equal decisions together."""
    found: dict[bytes, list[int]] = {}
    for image in range(len(next(iter(values.values())))):
        key = b''.join((value[image] != 0).tobytes() for value in values.values())
        found.setdefault(key, []).append(image)
    return list(found.values())
