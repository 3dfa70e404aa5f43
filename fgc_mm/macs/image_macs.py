# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What the computation of one image came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class ImageMACs:
    """Executed and dense MACs of one image, and what its gates decided.

    Executed MACs include the gates' own. Adding two of them joins two passes of
    the same model over an image (windows, test-time augmentation).

    Attributes:
        backbone_executed (float): MACs executed in the backbone.
        backbone_dense (float): MACs of the same backbone without gates.
        model_executed (float): MACs executed in the whole model.
        model_dense (float): MACs of the whole model without gates.
        gates (tuple): (name, channels) of every gate, in network order.
        decisions (tuple): For each pass, how often each gate decided, and all
            decisions as packed bits.
        regions (dict): Of gates that decide for regions of the image: name -> how many regions,
            and in how many of them each channel is open.
    """

    backbone_executed: float
    backbone_dense: float
    model_executed: float
    model_dense: float
    gates: tuple[tuple[str, int], ...] = ()
    decisions: tuple[tuple[tuple[int, ...], bytes], ...] = ()
    regions: Mapping[str, tuple[int, np.ndarray]] = field(default_factory=dict)

    @property
    def pruning_ratio(self) -> float:
        """Share of the backbone's MACs that was saved."""
        return 1 - self.backbone_executed / self.backbone_dense if self.backbone_dense else 0.0

    def masks(self) -> dict[str, np.ndarray]:
        """The decisions: name of the gate -> passes x channels, 0 or 1. Those about regions are in
        ``regions``."""
        rows: dict[str, list[np.ndarray]] = {name: [] for name, _ in self.gates}
        for passes, packed in self.decisions:
            bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8))
            start = 0
            for (name, channels), n in zip(self.gates, passes, strict=True):
                rows[name].append(bits[start : start + n * channels].reshape(n, channels))
                start += n * channels
        return {
            name: np.concatenate(rows[name]) if rows[name] else np.zeros((0, channels), np.uint8)
            for name, channels in self.gates
        }

    def __add__(self, other: ImageMACs) -> ImageMACs:
        if self.gates != other.gates:
            raise ValueError('only the MACs of passes through the same model can be added')
        regions = dict(self.regions)
        for name, (count, opened) in other.regions.items():
            before = regions.get(name, (0, 0))
            regions[name] = before[0] + count, before[1] + opened
        return ImageMACs(
            self.backbone_executed + other.backbone_executed,
            self.backbone_dense + other.backbone_dense,
            self.model_executed + other.model_executed,
            self.model_dense + other.model_dense,
            self.gates,
            self.decisions + other.decisions,
            regions,
        )
