# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Where the pictures of a batch are in the tensors behind a layer.

A gate decides for each picture. So what it switches has to keep the pictures apart, in their order,
along the first dimension: this follows them there as labels follow channels.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from .recorder import LAYER, Node, Ref
from .rules import ELEMENTWISE, NORMS, POOLS, Labels, NotPrivate, along, step, where


class Images:
    """The pictures in the tensors behind a layer.

    Args:
        out (Ref): The output of the layer; its first dimension are the pictures.
    """

    def __init__(self, out: Ref) -> None:
        self.count = out.shape[0]
        # None stands for the usual: along the first dimension, in their order.
        self._found: dict[int, Optional[Labels]] = {out.value: None}

    def first_in(self, ref: Ref) -> bool:
        """Whether the pictures are along the first dimension of a tensor, in their order."""
        return self._found.get(ref.value, ()) is None

    def step(self, node: Node, constants: set[int]) -> None:
        """Follow the pictures through an operation.

        Raises:
            NotPrivate: If it mixes them.
        """
        read = [ref for ref in node.read if ref.value in self._found]
        usual = all(self._found[ref.value] is None for ref in read)
        if usual and self._keeps(node, read):
            self._found.update((ref.value, None) for ref in node.outputs)
            return
        labels = {ref.value: self._labels(ref) for ref in read}
        try:
            if node.kind == 'cat':
                found = self._concatenated(node, labels, constants)
            else:
                found = step(node, labels, constants)
        except NotPrivate:
            raise NotPrivate(f'{node.op} lets pictures meet{where(node)}') from None
        for ref, mine in zip(node.outputs, found, strict=True):
            if mine is not None:
                self._found[ref.value] = None if self._is_usual(mine, ref) else mine

    def _keeps(self, node: Node, read: list[Ref]) -> bool:
        """Whether an operation does nothing to its first dimension, whatever its arguments."""
        if node.op == LAYER or node.kind in NORMS or node.kind in POOLS:
            return True
        return node.kind in ELEMENTWISE and all(
            len(ref.shape) == len(out.shape) and ref.shape[0] == out.shape[0]
            for ref in read
            for out in node.outputs
        )

    def _labels(self, ref: Ref) -> Labels:
        found = self._found[ref.value]
        return along(0, (self.count, *ref.shape[1:])) if found is None else found

    def _is_usual(self, labels: Labels, ref: Ref) -> bool:
        return (
            len(ref.shape) > 0
            and ref.shape[0] == self.count
            and np.array_equal(labels, along(0, ref.shape))
        )

    def _concatenated(
        self, node: Node, labels: dict[int, Labels], constants: set[int]
    ) -> list[Optional[Labels]]:
        """Beside each other everything keeps its pictures."""
        dim = node.kwargs.get('dim', node.args[1] if len(node.args) > 1 else 0)
        parts = list(labels.values())
        alike = all(np.array_equal(part, parts[0]) for part in parts)
        if alike and parts[0].shape[int(dim) % parts[0].ndim] == 1:
            return [parts[0]]
        return step(node, labels, constants)
