# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which module's input a gate reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

import torch.nn as nn

from .recorder import LAYER, Call, Record, Ref


@dataclass
class Source:
    """Where a gate looks.

    Attributes:
        module (str): Path of the module whose input it reads.
        given (Ref): That input, in the first call.
        axis (int): Where its channels are, 1 or -1.
        starts (list[int]): Numbers of the first nodes of the module's calls.
    """

    module: str
    given: Ref
    axis: int
    starts: list[int]


def find_source(
    record: Record, modules: Mapping[str, nn.Module], name: str, calls: list[int]
) -> Source:
    """The block around a layer if a layer in it reads the block's input, else the layer itself.

    Args:
        record (Record): The pass.
        modules (Mapping): Path -> module.
        name (str): Path of the layer.
        calls (list[int]): The nodes of its calls.
    """
    first = calls[0]
    made = record.nodes[first].outputs[0]
    parts = name.split('.')
    for end in range(len(parts) - 1, 0, -1):
        path = '.'.join(parts[:end])
        if isinstance(modules[path], (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            continue  # a row of blocks, not one
        own = [call for call in record.calls if call.module == path]
        if len(own) != len(calls) or not all(
            call.start <= number < call.end for call, number in zip(own, calls, strict=True)
        ):
            continue
        given = own[0].given
        reader = _reader_of(record, own[0], first)
        if reader is not None and given is not None and given.shape[0] == made.shape[0]:
            starts = [call.start for call in own]
            return Source(path, given, _axis(modules[reader]), starts)
    node = record.nodes[first]
    ref = node.args[0] if node.args else next(iter(node.kwargs.values()))
    return Source(name, ref, _axis(modules[name]), list(calls))


def _reader_of(record: Record, call: Call, before: int) -> Optional[str]:
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
    """Whether a tensor is a block's input, as it is or normalized and activated: blocks with
    pre-activation begin so."""
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
