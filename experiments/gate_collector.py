# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What the gates of a network decide over a dataset."""

from __future__ import annotations

from typing import Any, Optional

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor

from fgc_mm.gates import GateRecord, find_gates
from fgc_mm.runtime import unwrap


class GateCollectorHook(Hook):
    """Keeps the records of all gates over one pass of the test loop.

    ``records`` then holds, for each gate, one record of all tested pictures in
    the order of the loader, on the CPU. Several passes of the network over one
    picture (test-time augmentation, sliding windows) leave the last one.

    Example:
        >>> collector = GateCollectorHook()
        >>> runner.register_hook(collector)
        >>> runner.test()
        >>> collector.records['backbone.layer4.1.gate1'].logits.shape
        torch.Size([1000, 512])
    """

    def __init__(self) -> None:
        self.records: dict[str, GateRecord] = {}
        self._batches: dict[str, list[GateRecord]] = {}

    def before_test(self, runner: Runner) -> None:
        """Start anew."""
        gates = find_gates(unwrap(runner.model))
        if not gates:
            raise ValueError(
                f'GateCollectorHook: the model {type(unwrap(runner.model)).__name__} has no gates'
            )
        self.records = {}
        self._batches = {name: [] for name in gates}

    def after_test_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Keep the records of this batch."""
        for name, gate in find_gates(unwrap(runner.model)).items():
            if gate.record is not None:
                self._batches[name].append(gate.record)
                gate.record = None

    def after_test(self, runner: Runner) -> None:
        """Put the batches together."""
        self.records = {
            name: concatenate(batches) for name, batches in self._batches.items() if batches
        }
        self._batches = {}


def concatenate(records: list[GateRecord]) -> GateRecord:
    """One record of several batches, on the CPU."""

    def cat(field: str) -> Optional[Tensor]:
        parts = [getattr(record, field) for record in records]
        return None if parts[0] is None else torch.cat([part.detach().cpu() for part in parts])

    values = {field: cat(field) for field in ('logits', 'probs', 'mask', 'feature')}
    return GateRecord(**values)  # type: ignore[arg-type]


def openness(records: dict[str, GateRecord]) -> float:
    """Share of open channels over all gates and pictures."""
    masks = [record.mask for record in records.values()]
    return float(sum(m.sum() for m in masks)) / sum(m.numel() for m in masks)
