# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What is decided and computed in a pass through a frozen network."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor


class Kept:
    """The channels of a site that are computed.

    Args:
        mask (np.ndarray): For each decision, whether its channels are.
        fixed (bool): Whether it is the same object for many pictures, so that the weights for
            it are worth keeping. Defaults to False.
    """

    __slots__ = ('_index', 'fixed', 'mask')

    def __init__(self, mask: np.ndarray, fixed: bool = False) -> None:
        if not mask.any():  # no kernel computes nothing: one channel, multiplied by 0
            mask = mask.copy()
            mask[0] = True
        self.mask = mask
        self.fixed = fixed
        self._index: Optional[Tensor] = None

    def index(self, device: torch.device) -> Tensor:
        """Their numbers."""
        if self._index is None or self._index.device != device:
            self._index = torch.from_numpy(np.flatnonzero(self.mask)).to(device)
        return self._index


class Opened:
    """What was decided about a site in this pass, and what is computed of it.

    Args:
        values (np.ndarray): B x decisions, what channels are multiplied with.
        kept (Kept, optional): What is computed. Defaults to None, everything.
        exact (bool): Whether all that is computed is multiplied with 1.
    """

    __slots__ = ('exact', 'kept', 'values')

    def __init__(self, values: np.ndarray, kept: Optional[Kept], exact: bool) -> None:
        self.values = values
        self.kept = kept
        self.exact = exact


class Pass(threading.local):
    """The pass of a thread through a frozen network.

    Attributes:
        opened (dict): Site -> what was decided.
        original (bool): Whether layers run as they are, their inputs masked.
        recorded (bool): Whether its operations are being written down.
        done (Tensor, optional): What a layer returned that did the work of an activation as well.
        trial (set, optional): The sites for which decisions are drawn.
        gathered (set): Those whose closed channels are left out in a trial.
        each (bool): Whether a trial runs image by image.
        clocks (dict): Site -> when its last consumer was done, for those that are timed.
        waiting (dict): Source -> what is timed and when it began.
    """

    def __init__(self) -> None:
        self.opened: dict[str, Opened] = {}
        self.original = False
        self.recorded = False
        self.done: Optional[Tensor] = None
        self.trial: Optional[set[str]] = None
        self.gathered: set[str] = set()
        self.each = False
        self.clocks: dict[str, float] = {}
        self.waiting: dict[str, tuple] = {}

    def __reduce__(self) -> tuple:
        return Pass, ()  # of a copy or a pickle nothing runs


class Side:
    """The inputs or outputs of a layer, or a tensor's entries, and the sites they follow.

    Args:
        ends (Sequence): (site, for each channel the number of its decision, -1 where it follows
            none, or None for decision i for channel i).
    """

    def __init__(self, ends: Sequence[tuple[str, Optional[tuple[int, ...]]]]) -> None:
        self.ends = [(site, None if i is None else np.asarray(i)) for site, i in ends]
        self.plain = self.ends[0][0] if len(ends) == 1 and ends[0][1] is None else None

    def kept(self, opened: dict[str, Opened]) -> tuple[Optional[np.ndarray], Any]:
        """Which channels are computed, None for all, and what to keep weights by, if at all."""
        mask: Optional[np.ndarray] = None
        key: list[Optional[int]] = []
        for site, index in self.ends:
            known = opened.get(site)
            if known is None or known.kept is None:
                continue
            mine = known.kept.mask
            if index is not None:
                mine = mine[index] | (index < 0)
            mask = mine if mask is None else mask & mine
            key.append(id(known.kept) if known.kept.fixed else None)
        return mask, None if None in key else tuple(key)

    def index(
        self, opened: dict[str, Opened], device: torch.device
    ) -> tuple[Optional[Tensor], Any]:
        """Their numbers, None for all, and what to keep weights by."""
        if self.plain is not None:
            known = opened.get(self.plain)
            if known is None or known.kept is None:
                return None, ()
            kept = known.kept
            return kept.index(device), (id(kept),) if kept.fixed else None
        mask, key = self.kept(opened)
        if mask is None or mask.all():
            return None, ()
        return torch.from_numpy(np.flatnonzero(mask)).to(device), key

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
        mask = None if everything else self.kept(opened)[0]
        return (found if mask is None else found[:, mask]).astype(np.float32)
