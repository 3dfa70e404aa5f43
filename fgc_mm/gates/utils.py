# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding, choosing and forcing the gates of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Union

import torch.nn as nn
from torch import Tensor

from ..errors import UsageError, in_context
from .base import Gate
from .record import GateRecord

Layers = Union[str, int, Sequence[Union[str, int]]]


def find_gates(model: nn.Module) -> dict[str, Gate]:
    """All gates of a model by name, in network order.

    Args:
        model (nn.Module): A backbone, or any model with one inside.

    Returns:
        dict[str, Gate]: Name as in ``model.named_modules()`` -> gate.
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, Gate)}


def forget_records(gates: Mapping[str, Gate]) -> None:
    """Begin a new pass: what gates decided in the last one no longer counts."""
    for gate in gates.values():
        gate.record = None


def records_of(gates: Mapping[str, Gate]) -> dict[str, GateRecord]:
    """What gates decided in this forward pass, a row for each decision: one for each image, or
    several for levels and regions.

    Gates behind the last output of a network (``out_indices``) do not run, nor do those of a head
    without regions; they decide nothing and have no loss.

    Args:
        gates (Mapping[str, Gate]): Name -> gate.

    Raises:
        RuntimeError: If none has decided, because the pass went past them.
    """
    passes = {name: gate.pass_record for name, gate in gates.items()}
    records = {name: r for name, r in passes.items() if r is not None and len(r.mask)}
    if not records:
        raise RuntimeError(
            f'none of the {len(gates)} gates ran in this forward pass, the first is '
            f'{next(iter(gates))!r}; run the gated network before a loss on its gates'
        )
    return records


def gated_blocks(model: nn.Module) -> dict[str, list[tuple[str, Gate]]]:
    """All blocks that hold gates, in network order: name of the block -> its gates as (name,
    gate), the names as in ``model.named_modules()``."""
    blocks: dict[str, list[tuple[str, Gate]]] = {}
    for name, gate in find_gates(model).items():
        block = name.rpartition('.')[0]
        if gate.block is not None:  # that is the network's child `gates`
            block = '.'.join(filter(None, (block.rpartition('.')[0], gate.block)))
        blocks.setdefault(block, []).append((name, gate))
    return blocks


def match_blocks(layers: Layers, names: Sequence[str], key: str = 'layers') -> list[str]:
    """Resolve a choice of blocks against the names there are.

    Args:
        layers (str | int | Sequence): ``'all'``, ``'last_stage'``, the name of
            a stage (``'layer4'``) or block (``'layer4.1'``), the index of a
            block (negative counts from the end), or a sequence of those. What
            all names begin with (``'backbone.'``) may be left out.
        names (Sequence[str]): The names of all blocks, in network order.
        key (str): What the choice is called in the config, for the error.
            Defaults to 'layers'.

    Returns:
        list[str]: The chosen names, in network order.
    """
    wanted = [layers] if isinstance(layers, (str, int)) else list(layers)
    if not wanted:
        raise UsageError(f"{key}={layers!r} chooses no block; name some, or 'all'")
    chosen: set[str] = set()
    for item in wanted:
        chosen.update(_match_one(item, names, key))
    return [name for name in names if name in chosen]


def _match_one(item: Union[str, int], names: Sequence[str], key: str) -> list[str]:
    if isinstance(item, int) and not isinstance(item, bool):
        if -len(names) <= item < len(names):
            return [names[item]]
        raise UsageError(
            f'{key}: block index {item} is out of range, there are {len(names)} blocks '
            f'({-len(names)} to {len(names) - 1})'
        )
    if item == 'all':
        return list(names)
    stages = [name.rpartition('.')[0] for name in names]
    if item == 'last_stage':
        return [name for name, stage in zip(names, stages, strict=True) if stage == stages[-1]]
    # What all begin with, short of the stage: as much of it as one likes may be left out.
    above = [name.split('.')[:-2] for name in names]
    differ = (i for i, parts in enumerate(zip(*above, strict=False)) if len(set(parts)) > 1)
    common = next(differ, min(map(len, above)))

    def ways(name: str) -> list[str]:
        parts = name.split('.')
        return ['.'.join(parts[skip:]) for skip in range(common + 1)]

    pairs = zip(names, stages, strict=True)
    found = [n for n, stage in pairs if item and item in (*ways(n), *ways(stage))]
    if not found:
        shown = [ways(name)[-1] for name in names]
        known = dict.fromkeys(name.rpartition('.')[0] for name in shown if '.' in name)
        raise UsageError(
            f'{key}: {item!r} names no block; choose from '
            f"'all', 'last_stage', an index, {', '.join(map(repr, [*known, *shown]))}"
        )
    return found


def select_blocks(model: nn.Module, layers: Layers) -> dict[str, list[tuple[str, Gate]]]:
    """The gated blocks a config value chooses.

    Args:
        model (nn.Module): A model with gates.
        layers (str | int | Sequence): See :func:`match_blocks`; only blocks
            whose gates decide once for each picture can be chosen and are counted.

    Returns:
        dict[str, list]: As :func:`gated_blocks`.

    Example:
        >>> list(select_blocks(model, [-2, -1]))
        ['layer4.0', 'layer4.1']
    """
    every = gated_blocks(model)
    blocks = {
        name: [(n, gate) for n, gate in gates if gate.once_per_picture]
        for name, gates in every.items()
    }
    blocks = {name: gates for name, gates in blocks.items() if gates}
    others = [name for name in every if name not in blocks]
    why = (
        f'; {", ".join(others)} cannot be chosen: gates there decide for each level or region, and '
        'not once for a picture'
    )
    with in_context('', why if others else ''):
        if not blocks:
            raise UsageError(
                f'{type(model).__name__} has no gates to choose layers={layers!r} from; use a '
                "gated backbone, such as backbone=dict(type='GatedResNet', ...)"
            )
        return {name: blocks[name] for name in match_blocks(layers, list(blocks))}


def set_threshold(model: nn.Module, threshold: float) -> None:
    """Set the probability above which a channel is open in evaluation.

    A higher one closes more channels without any training.

    Args:
        model (nn.Module): A model with gates.
        threshold (float): Within (0, 1); the gates are trained for 0.5.
    """
    if not 0 < threshold < 1:
        raise UsageError(f'threshold={threshold} must be within (0, 1)')
    gates = find_gates(model)
    without = [name for name, gate in gates.items() if not hasattr(gate, 'threshold')]
    if not gates:
        raise UsageError(
            f'threshold={threshold} cannot be set: {type(model).__name__} has no gates'
        )
    if without:
        what = f'{type(gates[without[0]]).__name__} {without[0]}'
        raise UsageError(f'threshold={threshold} cannot be set: {what} has no threshold')
    for gate in gates.values():
        gate.threshold = threshold  # type: ignore[assignment]


@contextmanager
def force_gates(
    model: nn.Module, value: Union[float, Mapping[str, Union[float, Tensor]]]
) -> Iterator[None]:
    """Replace the decisions of gates while the context lasts.

    Args:
        model (nn.Module): A model with gates.
        value (float | dict): 1.0 opens every gate, 0.0 closes every gate; a
            dict gives single gates, by name, a number or a mask of C or B x C
            values and leaves the others as they are.

    Example:
        >>> with force_gates(model, 1.0):
        ...     dense = model(x)
    """
    gates = find_gates(model)
    values = dict(value) if isinstance(value, Mapping) else dict.fromkeys(gates, value)
    for name, forced in values.items():
        if name not in gates:
            raise UsageError(f'force_gates: no gate {name!r}; the gates are {", ".join(gates)}')
        if isinstance(forced, Tensor) and forced.dim() and forced.size(-1) != gates[name].channels:
            raise UsageError(
                f'force_gates: {name!r} decides over {gates[name].channels} channels but was given '
                f'a mask of shape {tuple(forced.shape)}'
            )
    before = {name: gates[name].forced for name in values}
    try:
        for name, forced in values.items():
            gates[name].forced = forced
        yield
    finally:
        for name in before:
            gates[name].forced = before[name]
