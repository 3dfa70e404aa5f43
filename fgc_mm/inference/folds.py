# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a layer can do of the steps after it: found in the record of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..sites.recorder import LAYER, Node, Record, Ref
from ..sites.rules import NORMS

_ACTS = (nn.ReLU, nn.ReLU6, nn.SiLU)


@dataclass
class Fold:
    """The norm and the activation after a layer, by their names, and whether a tensor is added in
    between, where nothing else reads what lies there."""

    norm: Optional[str] = None
    act: Optional[str] = None
    adds: bool = False


def find_folds(record: Record, modules: Mapping[str, nn.Module]) -> dict[str, Fold]:
    """Which norms and activations the layers of a network can do as well.

    Args:
        record (Record): A pass.
        modules (Mapping): Path -> module.
    """
    readers = record.readers()
    calls: dict[str, list[Node]] = {}
    norms: dict[str, list[Node]] = {}
    for node in record.nodes:
        if node.op == LAYER:
            calls.setdefault(node.module, []).append(node)
        elif node.kind in NORMS:
            norms.setdefault(node.module, []).append(node)

    def next_of(ref: Ref) -> Optional[Node]:
        """The only one that reads a tensor, as its first argument."""
        found = readers.get(ref.value, [])
        if len(found) != 1 or ref.value in record.outputs:
            return None
        node = record.nodes[found[0]]
        first = node.args[0] if node.args else None
        starts = isinstance(first, Ref) and first.value == ref.value
        return node if starts or _is_sum(node) else None

    folds: dict[str, Fold] = {}
    for name, nodes in calls.items():
        fold = Fold()
        after = [next_of(node.outputs[0]) for node in nodes]
        first = after[0]
        if (
            first is not None
            and is_foldable(modules[first.module])
            and all(node in norms.get(first.module, []) for node in after)
            and len(norms[first.module]) == len(nodes)
        ):
            fold.norm = first.module
            after = [next_of(node.outputs[0]) for node in after if node is not None]
            first = after[0]
        if all(node is not None and _is_sum(node) for node in after):
            sums = [next_of(node.outputs[0]) for node in after if node is not None]
            fold.adds = True
            if all(node is not None and type(modules[node.module]) is nn.ReLU for node in sums):
                fold.act = sums[0].module if sums[0] is not None else None
        elif first is not None and type(modules[first.module]) in _ACTS:
            kind = type(modules[first.module])
            if all(node is not None and type(modules[node.module]) is kind for node in after):
                fold.act = first.module
        folds[name] = fold
    return folds


def _is_sum(node: Node) -> bool:
    """Whether it adds two tensors of one shape."""
    shapes = [value.shape for value in node.args if isinstance(value, Ref)]
    same = len(shapes) == len(node.args) == 2 and shapes[0] == shapes[1]
    return node.kind == 'add' and same and not node.kwargs


def is_foldable(norm: Any) -> bool:
    """Whether a norm is, in evaluation, a factor and an offset per channel."""
    usual = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return (
        isinstance(norm, _BatchNorm)
        and norm.running_mean is not None
        and (not norm.affine or norm._parameters.get('weight') is not None)
        and type(norm).forward in usual
        and 'forward' not in norm.__dict__
    )
