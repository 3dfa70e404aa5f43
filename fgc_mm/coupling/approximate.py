# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Neighbors for banks that are too large to be searched as a whole every step."""

from __future__ import annotations

import logging
from typing import Any, Optional

import torch
from mmengine.logging import print_log
from torch import Tensor

from ..errors import UsageError
from .memory_bank import MemoryBank, iter_chunks
from .neighbors import check_k, nearest_neighbors
from .overlap import shared_entries
from .topk import merge, pack, unpack

_BASIS_ROWS = 16384
_CHUNK_ELEMENTS = 1 << 21


class ApproximateSearch:
    """Neighbors from a narrow sketch of a bank, ranked by the bank itself.

    The sketch holds every row projected onto the ``dims`` principal directions
    of the bank. The ``oversample * k`` best rows of the sketch are compared
    exactly, with the bank's own rows, and the k best of them are the answer: the
    similarities are exact, only a neighbor may be missed.

    Rows of the sketch follow every update of the bank. Only the directions age;
    they are taken anew every ``refresh`` searches. Each time, recall (the share
    of the exact neighbors that were found) is measured on queries of the
    batch, kept in :attr:`recall` and logged.

    It pays where the width D is large and the features are not isotropic; at
    D <= ``dims`` it is refused. The sketch adds ``dims / D`` of the bank's
    memory.

    Args:
        bank (MemoryBank): The bank.
        dims (int): Width of the sketch. Defaults to 64.
        oversample (int): Candidates per neighbor. Defaults to 4.
        refresh (int): Searches between two choices of directions.
            Defaults to 1000.
        recall_queries (int): Queries on which recall is measured; 0 turns it
            off. Defaults to 16.
        backend (str): Back end of the searches. Defaults to 'auto'.
    """

    def __init__(
        self,
        bank: MemoryBank,
        dims: int = 64,
        oversample: int = 4,
        refresh: int = 1000,
        recall_queries: int = 16,
        backend: str = 'auto',
    ) -> None:
        if not 1 <= dims < bank.dim:
            raise UsageError(
                f'approximate search: dims={dims} must be at least 1 and below the width of the '
                f'bank, {bank.dim}; search a bank this narrow exactly'
            )
        if oversample < 1 or refresh < 1 or recall_queries < 0:
            raise UsageError(
                f'approximate search: oversample={oversample} and refresh={refresh} must be at '
                f'least 1, recall_queries={recall_queries} at least 0'
            )
        self.bank = bank
        self.dims = dims
        self.oversample = oversample
        self.refresh = refresh
        self.recall_queries = recall_queries
        self.backend = backend
        self.recall: Optional[float] = None
        self.searches = 0
        self.basis: Optional[Tensor] = None
        self.sketch = torch.empty(0)  # drawn when it is first needed

    @torch.no_grad()
    def search(self, queries: Tensor, k: int, exclude: Tensor) -> tuple[Tensor, Tensor]:
        """Neighbors of the instances ``exclude``: row numbers and similarities."""
        check_k(k, self.bank.num_instances)
        queries = queries.detach().float()
        due = self.searches % self.refresh == 0
        self._prepare(queries.device, anew=due)
        found = self._search(queries, k, exclude)
        if due and self.recall_queries:
            self.recall = self.measure_recall(queries, k, exclude, found[0])
            count = min(self.recall_queries, len(queries))
            text = f'approximate neighbors: recall@{k} {self.recall:.3f} on {count} queries'
            print_log(text, logger='current', level=logging.INFO)
        self.searches += 1
        return found

    @torch.no_grad()
    def measure_recall(self, queries: Tensor, k: int, exclude: Tensor, found: Tensor) -> float:
        """Share of the exact neighbors among those found, of the first ``recall_queries``."""
        some = slice(0, max(1, self.recall_queries))
        exact = nearest_neighbors(queries[some], self.bank.data, k, exclude[some], self.backend)[0]
        return int(shared_entries(exact, found[some]).sum()) / exact.numel()

    def _search(self, queries: Tensor, k: int, exclude: Tensor) -> tuple[Tensor, Tensor]:
        assert self.basis is not None
        data, dim = self.bank.data, self.bank.dim
        candidates = min(self.oversample * k, self.bank.num_instances - 1)
        with torch.autocast(queries.device.type, enabled=False):
            narrow = queries @ self.basis
            rows, similarity = nearest_neighbors(
                narrow, self.sketch, candidates, exclude, self.backend
            )
            step = max(1, _CHUNK_ELEMENTS // (candidates * dim))
            for start in range(0, len(rows), step):
                part = slice(start, start + step)
                picked = data.index_select(0, rows[part].reshape(-1).to(data.device))
                picked = picked.to(queries.device, torch.float32).view(-1, candidates, dim)
                similarity[part] = torch.bmm(picked, queries[part, :, None])[:, :, 0]
        return unpack(merge((pack(similarity, rows),), k))

    def _prepare(self, device: torch.device, anew: bool = False) -> None:
        if not anew and self.sketch.numel() and self.sketch.device == device:
            return
        data = self.bank.data
        with torch.autocast(data.device.type, enabled=False):
            if anew or self.basis is None:
                step = max(1, data.size(0) // _BASIS_ROWS)
                rows = data[::step][:_BASIS_ROWS].float()
                moments = rows.t() @ rows
                self.basis = torch.linalg.eigh(moments.double())[1][:, -self.dims :].float()
            self.basis = self.basis.to(device)
            self.sketch = torch.empty(data.size(0), self.dims, device=device)
            for start, piece in iter_chunks(data, max(1, _CHUNK_ELEMENTS // self.bank.dim), device):
                torch.mm(piece, self.basis, out=self.sketch[start : start + len(piece)])

    @torch.no_grad()
    def rows_changed(self, indices: Tensor) -> None:
        """To be called after rows of the bank were updated."""
        if self.basis is None or not self.sketch.numel():
            return
        indices = indices.unique().to(self.bank.data.device)
        with torch.autocast(self.basis.device.type, enabled=False):
            rows = self.bank.data[indices].to(self.basis.device, torch.float32)
            self.sketch[indices.to(self.basis.device)] = rows @ self.basis

    def state_dict(self) -> dict[str, Any]:
        """Directions and counter; the sketch follows from the bank."""
        return dict(searches=self.searches, basis=self.basis, recall=self.recall)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """To be called after the bank was loaded."""
        self.searches = state['searches']
        self.recall = state['recall']
        self.basis = state['basis']
        self.sketch = torch.empty(0)
