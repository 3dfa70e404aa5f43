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
from .kernels import ACTIVATIONS

_IN_PLACE = ('relu', 'hardtanh', 'silu', 'add')


@dataclass
class Fold:
    """The norm and the activation after a layer, by their names, and whether a tensor that nobody
    needs later is added in between, where nothing else reads what lies between."""

    norm: str = ''
    act: str = ''
    adds: bool = False


def find_folds(record: Record, modules: Mapping[str, nn.Module]) -> dict[str, Fold]:
    """Which norms and activations the layers of a network can do as well."""
    readers = record.readers()
    makers = {ref.value: node for node in record.nodes for ref in node.outputs}
    kept = record.outputs | record.constants
    calls: dict[str, list[Node]] = {}
    norms: dict[str, list[Node]] = {}
    for node in record.nodes:
        if node.op == LAYER:
            calls.setdefault(node.module, []).append(node)
        elif node.kind in NORMS:
            norms.setdefault(node.module, []).append(node)

    def after(nodes: list[Node]) -> list[Node]:
        """What reads the outputs first, if it is the same module and nothing else does."""
        found = []
        for value in [node.outputs[0].value for node in nodes]:
            numbers = readers.get(value, [])
            node = record.nodes[numbers[0]] if len(numbers) == 1 and value not in kept else None
            first = node.args[0] if node is not None and node.args else None
            if node is None or not isinstance(first, Ref) or first.value != value:
                return []
            found.append(node)
        return found if len({node.module for node in found}) == 1 else []

    def is_fresh(value: int) -> bool:
        """Whether a tensor shares memory with no other."""
        node = makers.get(value)
        op = node.kind if node else ''
        if node is not None and op in _IN_PLACE:
            return is_fresh(node.read[0].value)
        return op == LAYER or op in NORMS or op.startswith('max_pool')

    def sum_of(value: int) -> Optional[Node]:
        """The sum with a tensor that nobody needs later, if nothing else reads a value."""
        number = readers.get(value, [-1])[-1]
        node = record.nodes[number]
        inputs = node.read
        if node.kind != 'add' or len(inputs) != 2 or node.kwargs or value in kept:
            return None
        other = inputs[inputs[0].value == value]
        before = [record.nodes[i] for i in readers[other.value] if i != number]
        spent = other.value not in kept and is_fresh(other.value) and number > 0
        spent = spent and all(i <= number for i in readers[other.value])
        same = inputs[0].shape == inputs[1].shape and len(readers[value]) == 1
        return node if same and spent and all(node.op == LAYER for node in before) else None

    folds: dict[str, Fold] = {}
    for name, nodes in calls.items():
        folds[name] = fold = Fold()
        reading = after(nodes)
        module = reading[0].module if reading else ''
        if reading and reading == norms.get(module) and is_foldable(modules[module]):
            fold.norm, nodes = module, reading
        sums = [node for node in map(sum_of, [n.outputs[0].value for n in nodes]) if node]
        fold.adds = len(sums) == len(nodes)
        reading = after(sums if fold.adds else nodes)
        act = modules[reading[0].module] if reading else None
        if type(act) in ACTIVATIONS and 'forward' not in vars(act):
            fold.act = reading[0].module
    return folds


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
