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
        if isinstance(read, Ref) and read.value == call.given.value:
            return node.module
    return None


def _axis(reader: nn.Module) -> int:
    return -1 if isinstance(reader, nn.Linear) else 1
