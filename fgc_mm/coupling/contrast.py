# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The contrast of Feature-Gate Coupling over all rows of a bank.

With ``s_ij = a_i . V[j] / tau`` over all N rows and ``p(j|i) = softmax_j(s_ij)``,
an instance i with positives P_i contributes one of

=========== ============================ =====================================
form        loss                         gradient in a_i
=========== ============================ =====================================
`sum_log`   - sum_{j in P} log p(j)      (k E_p[v] - sum_P v_j) / tau
`mean_log`  `sum_log` / k                (E_p[v] - mean_P v_j) / tau
`log_sum`   - log sum_{j in P} p(j)      (E_p[v] - sum_P w_j v_j) / tau,
                                         w = softmax of s over P
=========== ============================ =====================================

`sum_log` is Eq. 8 of the paper, `log_sum` the authors' code. The softmax is
never formed as a whole: one pass over the bank keeps, per instance, the partition
sum and the sum that becomes ``E_p[v]``, so the gradient is known when the loss is,
and nothing of size B x N is kept for backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .memory_bank import iter_chunks

FORMS = ('sum_log', 'mean_log', 'log_sum')

# Logits held at once, by each thread. On a CPU a piece should stay in the cache, and
# threads that work together should not meet too often.
_CPU_ELEMENTS = 1 << 18
_CPU_SHARES = 4
_DEVICE_ELEMENTS = 1 << 24
_SAMPLE_ROWS = 1024
_BAG = 16


def contrast_and_gradient(
    queries: Tensor,
    bank: Tensor,
    positives: Tensor,
    form: str = 'mean_log',
    tau: float = 0.07,
    chunk: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """Contrast of each instance of a batch against a bank, of shape (B,), and its gradient in the
    instance's own row, B x D.

    Both come out of one pass, and neither has a graph: :func:`with_gradient` makes a loss of
    them. Queries, finite, are B x D; half precision is computed in float32, float64 in float64,
    whatever autocast says. Positives are B x K row numbers of the bank. A row that is listed
    twice counts twice; -1 stands for none, so that instances may have different numbers of
    positives. An instance without any contributes nothing.

    Example:
        >>> a = torch.randn(4, 8, requires_grad=True)
        >>> bank = torch.nn.functional.normalize(torch.randn(100, 8), dim=1)
        >>> each, gradient = contrast_and_gradient(a, bank, torch.randint(100, (4, 5)))
        >>> with_gradient(a, each.sum(), gradient).backward()
    """
    queries, positives = queries.detach(), positives.to(queries.device)
    if queries.dtype != torch.float64:
        queries = queries.float()
    if chunk is None:
        chunk = rows_per_chunk(queries, bank)
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        center = _center(bank, queries)
        lse, mean_row = _partition(queries, bank, center, tau, chunk)
        loss, pull, weight = _attract(queries, bank, center, positives, form, tau, lse)
        return loss, (weight[:, None] * mean_row - pull) / tau


def with_gradient(x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """A number as a loss whose gradient in ``x`` is known already."""
    return _Known.apply(x, value, gradient)


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:  # type: ignore[override]
        ctx.dtype = x.dtype
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_value: Tensor):  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return (grad_value * gradient).to(ctx.dtype), None, None


def rows_per_chunk(queries: Tensor, bank: Tensor) -> int:
    """Rows of the bank such that neither they nor their logits exceed a piece."""
    return max(1, min(bank.size(0), _elements(queries) // max(1, *queries.shape)))


def _elements(like: Tensor) -> int:
    if like.device.type != 'cpu':
        return _DEVICE_ELEMENTS
    return _CPU_ELEMENTS * (1 if torch.get_num_threads() == 1 else _CPU_SHARES)


def _sample(bank: Tensor) -> Tensor:
    """Some rows from all over the bank."""
    return bank[:: max(1, bank.size(0) // _SAMPLE_ROWS)][:_SAMPLE_ROWS]


def _center(bank: Tensor, like: Tensor) -> Tensor:
    """A point in the middle of the bank, from which all rows are measured.

    Loss and gradient do not change when the same vector is subtracted from
    every row. In a trained bank the rows are close together: without this the
    logits would be large and alike, and the gradient a small difference of
    large means. Zero if the rows point everywhere and it would not help.
    """
    rows = _sample(bank).float()
    center = rows.mean(dim=0)
    spread_out = center.norm() < 0.25 * rows.norm(dim=1).mean()
    return torch.where(spread_out, torch.zeros_like(center), center).to(like)


def _partition(
    queries: Tensor,
    bank: Tensor,
    center: Tensor,
    tau: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """log sum_j exp(s_ij) and E_p[v] of every query, in one pass over the bank.

    Exponentials are taken relative to the largest logit of a sample. Being one
    of all logits it lets nothing vanish, and the true largest may exceed it by a
    factor of 2^100 before anything overflows. Where that happens, and this is all
    that is asked here, the largest logit is found first, in a pass of its own.

    Logits are to base 2: on a CPU ``exp2`` takes half the time of ``exp``.
    """
    scaled = queries * (math.log2(math.e) / tau)
    sample = _sample(bank).to(queries) - center
    offset = torch.mm(sample, scaled.t()).amax(dim=0)
    sums = _exponential_sums(scaled, offset, bank, center, chunk)
    if not bool(sums.isfinite().all()):
        offset = _largest_logits(scaled, bank, center, chunk)
        sums = _exponential_sums(scaled, offset, bank, center, chunk)
    total = sums[:, -1]
    lse = (offset + total.log2()) * math.log(2)
    return lse, sums[:, :-1] / total[:, None]


def _exponential_sums(
    scaled: Tensor,
    offset: Tensor,
    bank: Tensor,
    center: Tensor,
    chunk: int,
) -> Tensor:
    """B x (D + 1): sum_j e_ij v_j and, last, sum_j e_ij; e = 2^(s_ij - offset).

    The offset is one more factor of the first product, against a column of ones
    in the rows, and the plain sum one more column of the second: so nothing
    passes over the logits but two products and ``exp2``.
    """
    batch, dim = scaled.shape
    chunk = min(chunk, bank.size(0))
    factors = torch.cat((scaled, -offset[:, None]), dim=1).t().contiguous()
    rows = scaled.new_ones(chunk, dim + 1)
    logits_buffer = scaled.new_empty(chunk, batch)
    sums = scaled.new_zeros(batch, dim + 1)
    for _, piece in iter_chunks(bank, chunk, scaled.device, scaled.dtype):
        rows = rows[: piece.size(0)]
        torch.sub(piece, center, out=rows[:, :-1])
        # Bank rows first: the product is faster that way round on a CPU.
        shares = torch.mm(rows, factors, out=logits_buffer[: rows.size(0)]).exp2_()
        sums.addmm_(shares.t(), rows)
    return sums


def _largest_logits(scaled: Tensor, bank: Tensor, center: Tensor, chunk: int) -> Tensor:
    largest = scaled.new_full((len(scaled),), -math.inf)
    for _, rows in iter_chunks(bank, chunk, scaled.device, scaled.dtype):
        largest = torch.maximum(largest, torch.mm(rows - center, scaled.t()).amax(dim=0))
    return largest


def _attract(
    queries: Tensor,
    bank: Tensor,
    center: Tensor,
    positives: Tensor,
    form: str,
    tau: float,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, pull of the positives (weighted sum of rows) and weight of E_p[v]."""
    valid = positives >= 0
    count = valid.sum(dim=1).to(queries.dtype)
    some = (count > 0).to(queries.dtype)
    if form == 'log_sum':
        logits = _positive_logits(queries / tau, bank, center, positives)
        logits = logits.masked_fill(~valid, -math.inf)
        weights = logits.softmax(dim=1).nan_to_num(0.0)
        pull = _weighted_rows(queries, bank, center, positives, weights)
        loss = torch.where(count > 0, lse - logits.logsumexp(dim=1), torch.zeros_like(lse))
        return loss, pull, some
    weights = valid.to(queries.dtype)
    if form == 'mean_log':
        weights = weights / count.clamp_min(1)[:, None]
    pull = _weighted_rows(queries, bank, center, positives, weights)
    weight = count if form == 'sum_log' else some
    return weight * lse - (queries * pull).sum(dim=1) / tau, pull, weight


def _positive_logits(scaled: Tensor, bank: Tensor, center: Tensor, positives: Tensor) -> Tensor:
    """B x K products of the queries with their positives."""
    logits = scaled.new_empty(positives.shape)
    for part, rows in _gathered(scaled, bank, positives):
        torch.bmm(rows.sub_(center), scaled[part, :, None], out=logits[part, :, None])
    return logits


def _weighted_rows(
    queries: Tensor,
    bank: Tensor,
    center: Tensor,
    positives: Tensor,
    weights: Tensor,
) -> Tensor:
    """B x D sums of the positives' rows, without gathering them where possible."""
    if bank.dtype == queries.dtype and bank.device == queries.device:
        # In bags of a few: the sum of all rows would be rounded at its own size,
        # which in a trained bank is large against what the center leaves of it.
        missing = -positives.size(1) % _BAG
        found = F.pad(positives.clamp_min(0), (0, missing)).view(-1, _BAG)
        weights = F.pad(weights, (0, missing)).view(-1, _BAG)
        bags = F.embedding_bag(found, bank.detach(), mode='sum', per_sample_weights=weights)
        bags = bags - weights.sum(dim=1, keepdim=True) * center
        per_query = (positives.size(1) + missing) // _BAG
        return bags.view(len(queries), per_query, bank.size(1)).sum(dim=1)
    pull = torch.empty_like(queries)
    for part, rows in _gathered(queries, bank, positives):
        pull[part] = torch.bmm(weights[part, None], rows.sub_(center))[:, 0]
    return pull


def _gathered(like: Tensor, bank: Tensor, positives: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the positives for some queries at a time, b x K x D."""
    count, dim = positives.size(1), bank.size(1)
    step = max(1, _elements(like) // max(1, count * dim))
    for start in range(0, positives.size(0), step):
        part = slice(start, start + step)
        picked = positives[part].clamp_min(0).reshape(-1).to(bank.device)
        # A copy, which the caller may write to.
        rows = bank.index_select(0, picked).to(like.device, like.dtype)
        yield part, rows.view(len(positives[part]), count, dim)
