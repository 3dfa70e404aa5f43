# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What one gate decided in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor


@dataclass
class GateRecord:
    """The decision of one gate for one batch.

    Attributes:
        logits (Tensor): B x C, the linear output of the gate, ``a`` in the
            paper. Carries the graph until the backward pass has used it.
        probs (Tensor): B x C, probability of each channel being open, ``pi``.
        mask (Tensor): B x C, hard 0/1 decision of this pass, without a graph.
        feature (Tensor, optional): B x C, the globally pooled feature before
            gating, detached; ``None`` until the gated convolution has run.
    """

    logits: Tensor
    probs: Tensor
    mask: Tensor
    feature: Optional[Tensor] = None

    @staticmethod
    def joined(records: Sequence[GateRecord]) -> GateRecord:
        """Several records of one gate as one, below each other.

        Args:
            records (Sequence[GateRecord]): Those of the calls of a pass.
        """
        return GateRecord(
            *(
                torch.cat([getattr(record, name) for record in records])
                for name in ('logits', 'probs', 'mask')
            )
        )
