# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Exact top-k of inner products over a bank, in pieces.

Similarity and row number are packed into one int64 key, whose order is: larger
similarity first, and of equal ones the smaller row number first. So there are
no ties, and pieces can be merged in any order with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from .memory_bank import iter_chunks

_NONE = -(1 << 63)  # sorts after every key
_LOW = (1 << 32) - 1
_GROUP = 8
_BLOCK = 1024  # queries at once: bounds the memory for any number of queries
_CPU_ELEMENTS = 1 << 20
_DEVICE_ELEMENTS = 1 << 24


def pack(similarity: Tensor, rows: Tensor) -> Tensor:
    """Keys of float32 similarities and the row numbers they belong to."""
    bits = (similarity + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) | (_LOW - rows)


def unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers and similarities of keys."""
    bits = (keys >> 32).int()
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return _LOW - (keys & _LOW), bits.view(torch.float32)


def merge(pieces: Iterable[Tensor], k: int) -> Tensor:
    """The k best keys of each row, sorted."""
    keys = torch.cat(list(pieces), dim=1)
    return keys.topk(min(k, keys.size(1)), dim=1).values


def topk_rows(
    queries: Tensor,
    data: Tensor,
    k: int,
    exclude: Optional[Tensor] = None,
    chunk: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """Row numbers and similarities of the k rows of largest inner product with each query, best
    first, each B x k.

    Queries are float32, the data of any float type and on any device. ``exclude`` has for each
    query a row that is left out (its own), -1 for none.
    """
    on_cpu = queries.device.type == 'cpu'
    filtered = on_cpu and data.size(0) >= max(4096, 16 * k)
    parts = []
    for start in range(0, max(1, queries.size(0)), _BLOCK):
        block = queries[start : start + _BLOCK]
        own = block.new_full((len(block),), -1, dtype=torch.int64)
        if exclude is not None:
            own = exclude[start : start + _BLOCK].to(own)
        rows = chunk or _rows_per_chunk(block, data)
        search = _filtered_keys if filtered else _plain_keys
        parts.append(search(block, data, k, own, rows))
    return unpack(torch.cat(parts))


def _rows_per_chunk(queries: Tensor, data: Tensor) -> int:
    elements = _CPU_ELEMENTS if queries.device.type == 'cpu' else _DEVICE_ELEMENTS
    width = max(1, queries.size(0))
    if data.dtype != queries.dtype or data.device != queries.device:
        width = max(width, data.size(1))
    return max(_GROUP, min(data.size(0), elements // width))


def _plain_keys(queries: Tensor, data: Tensor, k: int, own: Tensor, chunk: int) -> Tensor:
    """Top-k of every piece, merged."""
    best = own.new_empty(len(queries), 0)
    for start, rows in iter_chunks(data, chunk, queries.device):
        similarity = torch.mm(queries, rows.t())
        number = torch.arange(start, start + rows.size(0), device=queries.device)
        keys = pack(similarity, number)
        keys.masked_fill_(number == own[:, None], _NONE)
        best = merge((best, keys), k)
    return best


def _filtered_keys(queries: Tensor, data: Tensor, k: int, own: Tensor, chunk: int) -> Tensor:
    """Top-k of what passes a threshold guessed beforehand, on a CPU.

    A full top-k costs twice the matrix product. Here a sample of the bank gives
    each query a threshold that somewhat more than k rows should pass; only the
    maxima of groups of rows are compared with it, and only groups that pass are
    opened. The guess costs time when it is bad, not exactness: what has passed
    is thinned out when it gets too much, and a query that let fewer than k rows
    pass is searched the plain way.

    What is left to select is little and scattered: NumPy, on one core, does it
    in half the time of torch's ``nonzero`` and ``index_select``.
    """
    batch = len(queries)
    chunk = max(_GROUP, chunk // _GROUP * _GROUP)
    transposed = queries.t().contiguous()
    passed = _Passed(batch, k, _guess_threshold(transposed, data, k))
    # Bank rows first: the product is faster that way round on two cores, and
    # the maxima run along the queries. Group g holds the rows g, g + groups, ...
    similarity = torch.empty(chunk, batch)
    members = similarity.view(_GROUP, -1)
    order = own.argsort()
    sorted_own = own[order]
    starts = torch.arange(0, data.size(0) + chunk, chunk)
    bounds = torch.searchsorted(sorted_own, starts).tolist()

    for piece, (start, rows) in enumerate(iter_chunks(data, chunk)):
        torch.mm(rows, transposed, out=similarity[: rows.size(0)])
        similarity[rows.size(0) :] = -math.inf
        mine = slice(bounds[piece], bounds[piece + 1])
        similarity[sorted_own[mine] - start, order[mine]] = -math.inf

        maxima = members.amax(dim=0).view(-1, batch)
        group = np.flatnonzero((maxima >= passed.threshold).numpy())
        query = group % batch
        values = members.numpy().take(group, axis=1)
        kept = np.flatnonzero(values >= passed.threshold.numpy().take(query))
        member, which = np.divmod(kept, max(1, len(group)))
        row = member * (chunk // _GROUP) + group.take(which) // batch
        query = query.take(which)
        passed.add(query, row + start, values.ravel().take(kept))

    best = passed.best()
    short = (passed.count < k).nonzero().view(-1)
    if short.numel():
        best[short] = _plain_keys(queries[short], data, k, own[short], chunk)
    return best


def _guess_threshold(transposed: Tensor, data: Tensor, k: int) -> Tensor:
    """A similarity that a little more than k rows of the bank should reach."""
    size = data.size(0)
    if size < _GROUP:
        return transposed.new_full((transposed.size(1),), -math.inf)
    sample = min(8192, max(2048, size // 16), size) // _GROUP * _GROUP
    rows = data[:: size // sample][:sample].float()
    similarity = torch.mm(rows, transposed)
    maxima = similarity.view(_GROUP, -1, similarity.size(1)).amax(dim=0)
    expected = k * sample / size
    # Three standard deviations of a Poisson count, and one for the query itself.
    rank = math.ceil(expected + 3 * math.sqrt(expected)) + 1
    rank = min(rank, k + 1, maxima.size(0))
    return maxima.t().topk(rank, dim=1).values[:, -1].contiguous()


class _Passed:
    """What passed the threshold so far, a growing number per query."""

    def __init__(self, batch: int, k: int, threshold: Tensor) -> None:
        self.batch = batch
        self.k = k
        self.threshold = threshold
        self.limit = 8 * k + 512  # per query: on average, and twice that for any one
        self.count = torch.zeros(batch, dtype=torch.int64)
        self.pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, query: np.ndarray, row: np.ndarray, similarity: np.ndarray) -> None:
        """Add rows; raises the threshold when there are too many."""
        # 16 bits: NumPy sorts them by counting.
        self.pieces.append((query.astype(np.uint16), row, similarity))
        self.count += torch.from_numpy(np.bincount(query, minlength=self.batch))
        held = int(self.count.sum())
        if held > self.batch * self.limit or int(self.count.max()) > 2 * self.limit:
            self._thin_out()

    def best(self) -> Tensor:
        """batch x k keys, filled up with ``_NONE``."""
        query, row, similarity = (np.concatenate(part) for part in zip(*self.pieces, strict=True))
        order = query.argsort(kind='stable')
        query = query.take(order).astype(np.int64)
        keys = pack(torch.from_numpy(similarity.take(order)), torch.from_numpy(row.take(order)))
        width = max(self.k, int(self.count.max()))
        # Where query q begins in the table, less where it begins in the list.
        shift = np.arange(self.batch) * width - (self.count.cumsum(0) - self.count).numpy()
        table = torch.full((self.batch * width,), _NONE, dtype=torch.int64)
        table[torch.from_numpy(np.arange(len(query)) + shift.take(query))] = keys
        return table.view(self.batch, width).topk(self.k, dim=1).values

    def _thin_out(self) -> None:
        best = self.best()
        kept = (best != _NONE).numpy()
        row, similarity = unpack(best)
        query = np.nonzero(kept)[0].astype(np.uint16)
        self.pieces = [(query, row.numpy()[kept], similarity.numpy()[kept])]
        self.count = self.count.clamp_max(self.k)
        # From here on a row must beat the k-th best: at a tie the earlier wins.
        kth = similarity[:, -1]
        beat = torch.nextafter(kth, torch.full_like(kth, math.inf))
        raised = torch.maximum(self.threshold, beat)
        self.threshold = torch.where(self.count >= self.k, raised, self.threshold)
