# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Parameters and buffers that meet the channels of a site between its layers."""

from __future__ import annotations

import numpy as np
import torch.nn as nn

from .recorder import LAYER, Node, Record, Ref
from .rules import FACTORS, NORMS, SUMS, Labels, NotPrivate, along, step

Key = tuple[str, int]
"""A tensor's name and one of its dimensions."""


class ScaleFinder:
    """Knows which entry of a parameter or buffer meets which channel.

    What the pass makes of a parameter before it meets a channel is followed as channels are:
    a view, its exponential, one plus it.
    """

    def __init__(self, module: nn.Module, record: Record) -> None:
        self.record = record
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        self._labels: dict[int, dict[Key, Labels]] = {}
        for node in record.nodes:
            if node.op != LAYER:
                self._derive(node)

    def _of(self, ref: Ref) -> dict[Key, Labels]:
        """Labels of a tensor by the dimensions of the parameters it is made of."""
        name = self.record.names.get(ref.value)
        if name is None:
            return self._labels.get(ref.value, {})
        sizes = enumerate(ref.shape)
        return {(name, dim): along(dim, ref.shape) for dim, size in sizes if size > 1}

    def _derive(self, node: Node) -> None:
        """What a node makes of constants alone."""
        read = node.read
        if not read or not all(ref.value in self.record.constants for ref in read):
            return
        for key in {key for ref in read for key in self._of(ref)}:
            mine = {ref.value: self._of(ref)[key] for ref in read if key in self._of(ref)}
            try:
                outputs = step(node, mine, self.record.constants)
            except NotPrivate:
                continue
            for ref, labels in zip(node.outputs, outputs, strict=True):
                if labels is not None and ref.value not in self.record.names:
                    self._labels.setdefault(ref.value, {})[key] = labels

    def add(self, node: Node, labels: dict[int, Labels], scales: dict[Key, np.ndarray]) -> None:
        """Note for the parameters that meet labeled channels in a node which one each entry meets,
        -1 for none."""
        if node.kind not in FACTORS | SUMS | NORMS:
            return
        channels = [labels[ref.value] for ref in node.read if ref.value in labels]
        for ref in node.read:
            for key, own in ({} if ref.value in labels else self._of(ref)).items():
                for met in channels:
                    if node.kind in NORMS:  # one entry for each channel of dimension 1
                        own, met = own.reshape(-1), met.reshape(-1)
                    self._meet(key, own, met, scales)

    def _meet(self, key: Key, own: Labels, met: Labels, scales: dict[Key, np.ndarray]) -> None:
        rank = max(own.ndim, met.ndim)
        own = own.reshape((1,) * (rank - own.ndim) + own.shape)
        met = met.reshape((1,) * (rank - met.ndim) + met.shape)
        if not any(a > 1 and b > 1 for a, b in zip(own.shape, met.shape, strict=True)):
            return  # the dimension is another one than that of the channels
        own, met = (part.reshape(-1) for part in np.broadcast_arrays(own, met))
        kept = (own >= 0) & (met >= 0)
        found = np.full(self._shapes[key[0]][key[1]], -1)
        found[own[kept]] = met[kept]
        known = scales.get(key, found)
        scales[key] = np.where(known >= 0, known, found)
