# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The batch Feature-Gate Coupling works on: that of all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

import torch
from mmengine.dist import all_gather, get_rank
from torch import Tensor

from ..errors import NonFiniteError, RunError, UsageError
from ..gates import GateRecord
from ..runtime.numbers.finite_search import all_finite

Read = Callable[[], tuple[Tensor, Optional[Tensor]]]
"""Gives the indices of a rank's instances, on the CPU, and their labels or, on all ranks, None."""


@dataclass
class LayerBatch:
    """What one gate saw, without a graph: B x C pooled features and logits."""

    feature: Tensor
    logits: Tensor


@dataclass
class Batch:
    """The instances of all ranks, in the order of the ranks.

    Attributes:
        indices (Tensor): Their indices, on the CPU, where looking at them waits for nothing.
        labels (Tensor, optional): Their labels, if they were asked for, on the CPU.
        layers (dict[str, LayerBatch]): Gate -> what it saw.
        counts (list[int]): How many of them each rank has.
    """

    indices: Tensor
    labels: Optional[Tensor]
    layers: dict[str, LayerBatch]
    counts: list[int]

    @property
    def own(self) -> slice:
        """The rows of this rank."""
        start = sum(self.counts[: get_rank()])
        return slice(start, start + self.counts[get_rank()])

    @property
    def weight(self) -> float:
        """What the mean over this rank's instances counts for.

        DDP averages the gradients of the ranks as if all had as many instances.
        """
        return self.counts[get_rank()] * len(self.counts) / sum(self.counts)


def collect_batch(records: Mapping[str, GateRecord], read: Read) -> Batch:
    """Read the batch of this rank and gather those of the others, the same on every rank.

    If one rank cannot read its batch, all ranks raise: none is left waiting.

    Args:
        records (Mapping[str, GateRecord]): Gate -> record of this pass.
        read (Callable): See :data:`Read`; it may raise.
    """
    error: Optional[Exception] = None
    numbers = torch.zeros(0, 1, dtype=torch.int64)
    layers: dict[str, LayerBatch] = {}
    try:
        indices, labels = read()
        layers = {name: _seen(name, record, len(indices)) for name, record in records.items()}
        parts = [indices] if labels is None else [indices, labels.cpu().long().view_as(indices)]
        numbers = torch.stack(parts, dim=1)
    except (ValueError, IndexError) as caught:
        error = caught
    told = [row.tolist() for row in all_gather(torch.tensor([len(numbers), int(error is None)]))]
    if error is not None:
        raise error
    counts = [row[0] for row in told]
    failed = [rank for rank, row in enumerate(told) if not row[1]]
    if failed:
        raise RunError(f'rank {failed[0]} cannot read its batch; see its message')
    if len(counts) > 1:
        numbers = gather_rows(numbers, counts)
        # Everything in one message.
        rows = [part for layer in layers.values() for part in (layer.feature, layer.logits)]
        widths = [part.size(1) for part in rows]
        pieces = iter(gather_rows(torch.cat(rows, dim=1), counts).split(widths, dim=1))
        layers = {name: LayerBatch(next(pieces), next(pieces)) for name in layers}
    return Batch(numbers[:, 0], numbers[:, 1] if numbers.size(1) > 1 else None, layers, counts)


def _seen(name: str, record: GateRecord, size: int) -> LayerBatch:
    if len(record.logits) != size:
        raise UsageError(
            f'{name} saw {len(record.logits)} pictures but the batch has {size} data samples; '
            'a model that shows several views of a picture to its backbone cannot be coupled'
        )
    if record.feature is None:
        raise UsageError(f'{name} left no feature: its convolution did not run')
    return LayerBatch(record.feature, record.logits.detach())


def check_finite(batch: Batch, when: str) -> None:
    """Raise a NonFiniteError that names the gate and the first instance unless every feature and
    logit is a number, waiting for the device once."""
    named = [
        (f'the {what} of {name}', rows)
        for name, layer in batch.layers.items()
        for what, rows in (('features', layer.feature), ('logits', layer.logits))
    ]
    if bool(all_finite(rows for _, rows in named)):
        return
    what, rows = next((w, r) for w, r in named if not bool(all_finite([r])))
    bad = ~torch.isfinite(rows.float()).all(dim=1).cpu()
    raise NonFiniteError(
        f'{what} contain NaN or Inf for {int(bad.sum())} of {len(bad)} instances {when}, the first '
        f'is instance {int(batch.indices[bad][0])}; the training has diverged or that picture is '
        'broken. Nothing of this batch has entered a bank'
    )


def gather_rows(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all ranks under each other.

    Args:
        rows (Tensor): Those of this rank.
        counts (Sequence[int]): How many each rank has.
    """
    if len(counts) == 1:
        return rows
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = all_gather(padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
