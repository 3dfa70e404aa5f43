# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How far gate space follows feature space, and how fast neighbors change."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

from ..errors import UsageError
from .memory_bank import occurrences, unit_rows
from .neighbors import nearest_neighbors

_BLOCK = 1024


def shared_entries(a: Tensor, b: Tensor) -> Tensor:
    """How many entries of each row of ``a`` are in the same row of ``b``; -1 stands for none."""
    b = b.sort(dim=1).values
    place = torch.searchsorted(b, a.contiguous()).clamp_max(b.size(1) - 1)
    return ((b.gather(1, place) == a) & (a >= 0)).sum(dim=1)


@torch.no_grad()
def neighbor_overlap(
    features: Tensor,
    gates: Tensor,
    k: int,
    queries: Optional[Tensor] = None,
    backend: str = 'auto',
) -> float:
    """Share of feature-space neighbors that are also gate-space neighbors.

    What Feature-Gate Coupling is for: 1 if every instance has the same k
    nearest neighbors (by cosine) in both spaces, about k / N if the spaces have
    nothing to do with each other. Exact, in pieces.

    Args:
        features (Tensor): N x D pooled features.
        gates (Tensor): N x C gate vectors of the same instances: logits,
            probabilities, or rows of a gate bank.
        k (int): How many neighbors.
        queries (Tensor, optional): The instances to average over.
            Defaults to None: all.
        backend (str): Back end of the search. Defaults to 'auto'.

    Returns:
        float: The share, 0 to 1.

    Example:
        >>> x = torch.rand(100, 8)
        >>> neighbor_overlap(x, x, k=10)
        1.0
    """
    if features.size(0) != gates.size(0):
        raise UsageError(
            f'{features.size(0)} features and {gates.size(0)} gate vectors: there must be one of '
            'each per instance'
        )
    if queries is None:
        queries = torch.arange(features.size(0))
    spaces = [_as_unit(features), _as_unit(gates)]
    hits = 0
    for block in queries.split(_BLOCK):
        near = []
        for space in spaces:
            own = block.to(space.device)
            near.append(nearest_neighbors(space[own], space, k, own, backend)[0].cpu())
        hits += int(shared_entries(*near).sum())
    return hits / (max(1, queries.numel()) * k)


def _as_unit(x: Tensor) -> Tensor:
    """``x`` itself if its rows are unit vectors already, as those of a bank are."""
    lengths = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
    return x if bool(((lengths - 1).abs() < 1e-3).all()) else unit_rows(x)


class TurnoverMeter:
    """Turnover between the last two times that watched instances were seen.

    Keeping the neighbors of all instances would take N x k numbers, as much as
    a bank. So a fixed sample of instances is watched.

    Args:
        num_instances (int): N.
        k (int): Neighbors per instance.
        watched (int): How many instances are watched. Defaults to 1024.
        seed (int): Seed of the sample. Defaults to 0.
    """

    def __init__(self, num_instances: int, k: int, watched: int = 1024, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(num_instances, generator=generator)[:watched]
        self.chosen = chosen.sort().values
        self.last = torch.full((len(chosen), k), -1, dtype=torch.int64)
        self._changed = 0.0
        self._rows = 0

    def update(self, indices: Tensor, neighbors: Tensor) -> None:
        """Note the neighbors of a batch, B x k."""
        indices, neighbors = indices.cpu(), neighbors.cpu()
        slot = torch.searchsorted(self.chosen, indices).clamp_max(len(self.chosen) - 1)
        seen = (self.chosen[slot] == indices).nonzero().view(-1)
        if not len(seen):
            return
        turn = occurrences(slot[seen])  # an instance may come twice: one after the other
        for t in range(int(turn.max()) + 1):
            rows = seen[turn == t]
            old, new = self.last[slot[rows]], neighbors[rows]
            count = (new >= 0).sum(dim=1)
            known = (old[:, 0] >= 0) & (count > 0)
            shared = shared_entries(new[known], old[known])
            self._changed += float((1 - shared / count[known]).sum())
            self._rows += int(known.sum())
            self.last[slot[rows]] = new

    def compute(self) -> float:
        """Mean turnover since the last call; NaN if nothing was seen twice."""
        value = self._changed / self._rows if self._rows else math.nan
        self._changed, self._rows = 0.0, 0
        return value

    def state_dict(self) -> dict[str, Any]:
        return dict(last=self.last, changed=self._changed, rows=self._rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last.copy_(state['last'])
        self._changed, self._rows = state['changed'], state['rows']
