# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What is decided and computed in a pass through a frozen network."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor


class Opened:
    """What was decided about a site in this pass (``values``, B x decisions, are what channels are
    multiplied with), and what is computed of it (``mask``, None for everything).

    If it is ``fixed`` for many pictures, the weights for it are worth keeping. What is computed is
    padded to a multiple of ``step``: kernels are faster then, and fewer have to be made.
    """

    __slots__ = ('columns', 'exact', 'fixed', 'mask', 'rows', 'values')

    def __init__(
        self,
        values: np.ndarray,
        mask: Optional[np.ndarray] = None,
        fixed: bool = False,
        step: int = 1,
    ) -> None:
        own = values
        if mask is not None:
            rows = np.flatnonzero(mask)
            if not len(rows):  # no kernel computes nothing: one channel, multiplied by 0
                mask, rows = np.arange(len(mask)) == 0, np.zeros(1, np.int64)
            own = values[:, rows]
            self.rows = self.columns = rows
            pads = -len(rows) % step
            if pads and len(rows) + pads >= len(mask):
                self.rows = np.arange(len(mask))
                self.columns = np.where(mask, self.rows, len(mask))
            elif pads:
                self.rows = np.append(rows, rows[:1].repeat(pads))
                self.columns = np.append(rows, [len(mask)] * pads)
        self.exact = bool(own.all()) if own.dtype == bool else bool((own == 1).all())
        self.values = values
        self.mask = None if mask is None or mask.all() else mask
        self.fixed = fixed


class Pass(threading.local):
    """The pass of a thread through a frozen network.

    Attributes:
        opened (dict): Site -> what was decided.
        way (dict): Site -> how it is run, see :mod:`.ways`.
        original (bool): Whether layers run as they are, their inputs masked.
        recorded (bool): Whether its operations are being written down.
        done (Tensor, optional): What a layer returned that did the work of an activation as well.
        trial (set): The sites for which decisions are drawn.
    """

    def __init__(self) -> None:
        self.opened: dict[str, Opened] = {}
        self.way: dict[str, str] = {}
        self.original = False
        self.recorded = False
        self.done: Optional[Tensor] = None
        self.trial: set[str] = set()

    def __reduce__(self) -> tuple:
        return Pass, ()  # of a copy or a pickle nothing runs


class Side:
    """The inputs or outputs of a layer, or a tensor's entries, and the sites they follow: each with
    the number of the decision for each channel, -1 for none, or None for decision i for channel i.

    Where a layer ``reads``, what a site was padded with is channel ``len(mask)``, whose weights
    are zero.
    """

    def __init__(
        self, ends: Sequence[tuple[str, Optional[tuple[int, ...]]]], reads: bool = False
    ) -> None:
        self.ends = [(site, None if i is None else np.asarray(i)) for site, i in ends]
        self.reads = reads

    def index(
        self, opened: dict[str, Opened], device: torch.device
    ) -> tuple[Optional[Tensor], Any]:
        """The computed channels, None for all, and what to keep weights by, None if they are not
        worth it."""
        found = self._computed(opened)
        if found is None:
            return None, ()
        known = [opened[site] for site, _ in self.ends if site in opened]
        keep = all(one.fixed or one.mask is None for one in known)
        key = tuple(one.mask is None for one in known) if keep else None
        return torch.from_numpy(found).to(device), key

    def _computed(self, opened: dict[str, Opened]) -> Optional[np.ndarray]:
        mask: Optional[np.ndarray] = None
        for site, index in self.ends:
            known = opened.get(site)
            if known is None or known.mask is None:
                continue
            if len(self.ends) == 1 and index is None:
                return known.columns if self.reads else known.rows
            mine = known.mask if index is None else known.mask[index] | (index < 0)
            mask = mine if mask is None else mask & mine
        return None if mask is None or mask.all() else np.flatnonzero(mask)

    def factor(self, opened: dict[str, Opened], everything: bool = False) -> Optional[np.ndarray]:
        """B x computed channels, what they are multiplied with; None if it is 1."""
        found: Optional[np.ndarray] = None
        for site, index in self.ends:
            known = opened.get(site)
            if known is None or (known.exact and not everything):
                continue
            values = known.values
            if index is not None:
                values = np.where(index < 0, 1, values[:, index])
            found = values if found is None else found * values
        if found is None:
            return None
        computed = None if everything else self._computed(opened)
        if computed is not None:
            found = found[:, np.minimum(computed, found.shape[1] - 1)]
        return found.astype(np.float32)
