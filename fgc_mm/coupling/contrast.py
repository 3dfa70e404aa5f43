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
never formed as a whole: one pass over the bank keeps, per instance, the largest
logit, the partition sum and the sum that becomes ``E_p[v]``, so the gradient is
known when the loss is, and nothing of size B x N is kept for backward.
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

# Logits held at once. On a CPU a piece should stay in the cache: at B=256,
# N=50,000, D=64 on one busy core, loss and gradient took 63 to 66 ms of processor
# time with 1,024 to 4,096 rows at once, 76 ms with 8,192 and 81 ms with 16,384.
# Fewer pieces mean fewer meetings of the threads.
_CPU_ELEMENTS = 1 << 20
_DEVICE_ELEMENTS = 1 << 24
_CENTER_ROWS = 1024
_BAG = 16


def contrast_loss(
    queries: Tensor,
    bank: Tensor,
    positives: Tensor,
    form: str = 'mean_log',
    tau: float = 0.07,
    reduction: str = 'mean',
    chunk: Optional[int] = None,
) -> Tensor:
    """Contrast of a batch against a bank.

    Args:
        queries (Tensor): B x D, what is contrasted: ``a_i``. The gradient flows
            into them only. Half precision is computed in float32, float64 in
            float64, whatever autocast says.
        bank (Tensor): N x D, float32 or float16, on any device.
        positives (Tensor): B x K row numbers of the bank. A row that is listed
            twice counts twice; -1 stands for none, so that instances may have
            different numbers of positives. An instance without any
            contributes nothing.
        form (str): ``'sum_log'``, ``'mean_log'`` or ``'log_sum'``.
            Defaults to 'mean_log'.
        tau (float): Temperature. Defaults to 0.07.
        reduction (str): ``'mean'`` over the batch, ``'sum'`` or ``'none'``.
            Defaults to 'mean'.
        chunk (int, optional): Rows of the bank per piece. Defaults to a size
            that suits the device.

    Returns:
        Tensor: The loss, float32 (float64 for float64 queries); of shape (B,)
        without reduction.

    Example:
        >>> a = torch.randn(4, 8, requires_grad=True)
        >>> bank = torch.nn.functional.normalize(torch.randn(100, 8), dim=1)
        >>> contrast_loss(a, bank, torch.randint(100, (4, 5))).backward()
    """
    if form not in FORMS:
        raise ValueError(f'form={form!r} must be one of {FORMS}')
    if not tau > 0:
        raise ValueError(f'tau={tau} must be positive')
    if reduction not in ('mean', 'sum', 'none'):
        raise ValueError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    if queries.dim() != 2 or bank.dim() != 2 or queries.size(1) != bank.size(1):
        raise ValueError(
            f'queries of shape {tuple(queries.shape)} do not fit a bank of shape '
            f'{tuple(bank.shape)}: the widths must agree'
        )
    if positives.dim() != 2 or positives.size(0) != queries.size(0):
        raise ValueError(
            f'positives of shape {tuple(positives.shape)} must have one row for each of the '
            f'{queries.size(0)} queries'
        )
    if queries.dtype != torch.float64:
        queries = queries.float()
    if chunk is None:
        chunk = rows_per_chunk(queries, bank)
    loss = _Contrast.apply(queries, bank, positives.to(queries.device), form, tau, chunk)
    if reduction == 'none':
        return loss
    return loss.sum() if reduction == 'sum' else loss.sum() / max(1, len(loss))


def rows_per_chunk(queries: Tensor, bank: Tensor) -> int:
    """Rows of the bank such that neither they nor their logits exceed a piece."""
    return max(1, min(bank.size(0), _elements(queries) // max(1, *queries.shape)))


def _elements(like: Tensor) -> int:
    return _CPU_ELEMENTS if like.device.type == 'cpu' else _DEVICE_ELEMENTS


class _Contrast(torch.autograd.Function):
    """Loss per instance; its gradient is computed along with it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, queries: Tensor, bank: Tensor, positives: Tensor, form: str, tau: float, chunk: int
    ) -> Tensor:
        with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
            queries = queries.detach()
            center = _center(bank, queries)
            want_gradient = ctx.needs_input_grad[0]
            lse, mean_row = _partition(queries, bank, center, tau, chunk, want_gradient)
            loss, pull, weight = _attract(queries, bank, center, positives, form, tau, lse)
            if want_gradient:
                ctx.save_for_backward((weight[:, None] * mean_row - pull) / tau)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return grad_loss[:, None] * gradient, None, None, None, None, None


def _center(bank: Tensor, like: Tensor) -> Optional[Tensor]:
    """A point in the middle of the bank, from which all rows are measured.

    Loss and gradient do not change when the same vector is subtracted from
    every row. In a trained bank the rows are close together: without this the
    logits would be large and alike, and the gradient a small difference of
    large means. None if the rows point everywhere and it would not help.
    """
    step = max(1, bank.size(0) // _CENTER_ROWS)
    rows = bank[::step][:_CENTER_ROWS].float()
    center = rows.mean(dim=0)
    spread_out = bool(center.norm() < 0.25 * rows.norm(dim=1).mean())
    return None if spread_out else center.to(like)


def _partition(
    queries: Tensor,
    bank: Tensor,
    center: Optional[Tensor],
    tau: float,
    chunk: int,
    want_mean: bool,
) -> tuple[Tensor, Tensor]:
    """log sum_j exp(s_ij) and E_p[v] of every query, in one pass over the bank.

    ``total`` and ``mean`` are relative to the largest logit so far. Logits are
    to base 2: on a CPU ``exp2`` takes half the time of ``exp``.
    """
    batch, dim = queries.shape
    chunk = min(chunk, bank.size(0))
    scaled = queries * (math.log2(math.e) / tau)
    largest = queries.new_full((batch, 1), -math.inf)
    total = queries.new_zeros(batch, 1)
    mean = queries.new_zeros(batch, dim)
    logits_buffer = queries.new_empty(batch * chunk)
    rows_buffer = None if center is None else queries.new_empty(chunk, dim)
    for _, rows in iter_chunks(bank, chunk, queries.device, queries.dtype):
        if center is not None and rows_buffer is not None:
            rows = torch.sub(rows, center, out=rows_buffer[: rows.size(0)])
        logits = logits_buffer[: batch * rows.size(0)].view(batch, -1)
        torch.mm(scaled, rows.t(), out=logits)
        new_largest = torch.maximum(largest, logits.amax(dim=1, keepdim=True))
        shares = logits.sub_(new_largest).exp2_()
        keep = torch.exp2(largest - new_largest)
        total.mul_(keep).add_(shares.sum(dim=1, keepdim=True))
        if want_mean:
            mean.mul_(keep).addmm_(shares, rows)
        largest = new_largest
    lse = (largest + total.log2()) * math.log(2)
    return lse.squeeze(1), mean.div_(total)


def _attract(
    queries: Tensor,
    bank: Tensor,
    center: Optional[Tensor],
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


def _positive_logits(
    scaled: Tensor, bank: Tensor, center: Optional[Tensor], positives: Tensor
) -> Tensor:
    """B x K products of the queries with their positives."""
    logits = scaled.new_empty(positives.shape)
    for part, rows in _gathered(scaled, bank, positives):
        if center is not None:
            rows = rows.sub_(center)
        torch.bmm(rows, scaled[part, :, None], out=logits[part, :, None])
    return logits


def _weighted_rows(
    queries: Tensor,
    bank: Tensor,
    center: Optional[Tensor],
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
        if center is not None:
            bags = bags - weights.sum(dim=1, keepdim=True) * center
        return bags.view(len(queries), -1, bank.size(1)).sum(dim=1)
    pull = torch.empty_like(queries)
    for part, rows in _gathered(queries, bank, positives):
        if center is not None:
            rows = rows.sub_(center)
        pull[part] = torch.bmm(weights[part, None], rows)[:, 0]
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
        yield part, rows.view(-1, count, dim)
