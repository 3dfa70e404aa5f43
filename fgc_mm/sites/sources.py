# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which module's input a gate reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn as nn

from .recorder import LAYER, Call, Record, Ref


def find_source(
    record: Record, modules: Mapping[str, nn.Module], name: str, calls: list[int]
) -> tuple[str, int, Ref]:
    """The block around a layer if a layer in it reads the block's input, else the layer itself.

    Args:
        record (Record): The pass.
        modules (Mapping): Path -> module.
        name (str): Path of the layer.
        calls (list[int]): The nodes of its calls.

    Returns:
        tuple: Path of the module, where the channels of its input are, 1 or -1, and that input.
    """
    first = calls[0]
    parts = name.split('.')
    for end in range(len(parts) - 1, 0, -1):
        path = '.'.join(parts[:end])
        if isinstance(modules[path], (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            continue  # a row of blocks, not one
        around = [c for c in record.calls if c.module == path and c.start <= first < c.end]
        if len(around) != 1 or len(_calls_of(record, path)) != len(calls):
            continue
        reader = _reader_of(record, around[0], modules, first)
        if reader is not None:
            ref = around[0].given
            assert ref is not None
            return path, _axis(modules[reader]), ref
    node = record.nodes[first]
    ref = node.args[0] if node.args else next(iter(node.kwargs.values()))
    return name, _axis(modules[name]), ref


def _calls_of(record: Record, path: str) -> list[Call]:
    return [call for call in record.calls if call.module == path]


def _reader_of(
    record: Record, call: Call, modules: Mapping[str, nn.Module], before: int
) -> str | None:
    """The first layer in a block, up to the one in question, that reads the block's input; None
    where there is none, and for a block of a single layer."""
    if call.given is None:
        return None
    layers = [n for n in range(call.start, call.end) if record.nodes[n].op == LAYER]
    if len(layers) < 2:
        return None
    for number in layers:
        node = record.nodes[number]
        if number > before:
            return None
        read = node.args[0] if node.args else None
        if isinstance(read, Ref) and _is_from(record, read, call.given, call.start, number):
            return node.module
    return None


def _is_from(record: Record, read: Ref, given: Ref, start: int, end: int) -> bool:
    """Whether a tensor is a block's input, as it is or normalized and activated."""
    value = read.value
    for number in range(end - 1, start - 1, -1):
        node = record.nodes[number]
        if value == given.value:
            return True
        if value not in [ref.value for ref in node.outputs]:
            continue
        inputs = [ref for ref in node.inputs() if ref.value not in record.constants]
        if node.op == LAYER or len(inputs) != 1 or inputs[0].shape != read.shape:
            return False
        value = inputs[0].value
    return value == given.value


def _axis(reader: nn.Module) -> int:
    return -1 if isinstance(reader, nn.Linear) else 1
