# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How the sites of a gated network were found, so that they can be found again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import CheckpointError, UsageError
from .container import Gates
from .find import Example, Found, find_sites
from .parts import find_in_model


@dataclass(frozen=True)
class TensorLike:
    """Shape and type of a tensor in an example."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """A tensor of zeros that is like it."""
        return torch.zeros(self.shape, dtype=self.dtype)


def outline(example: Example) -> Any:
    """An example without the values of its tensors.

    Args:
        example (Tensor | Sequence | Mapping): What a network can be called with.
    """
    return tree_map(
        lambda value: (
            TensorLike(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        ),
        example,
    )


def filled(example: Any) -> Example:
    """An example of the outline of one.

    Args:
        example: What :func:`outline` made.
    """
    return tree_map(lambda v: v.tensor() if isinstance(v, TensorLike) else v, example)


@dataclass(frozen=True)
class InModel:
    """In place of the outline of an example: the sites were found in a whole model.

    Attributes:
        part (str): Name of the network in that model.
        shape (tuple): Channels, height and width of a picture.
    """

    part: str
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Gating:
    """How a network got its gates and widths; it is kept as ``gating`` of the network.

    Attributes:
        gate (dict, optional): Config of the gates, None if there is none.
        sites (list[str]): Names of the sites with a gate.
        widths (dict): Site -> the channels that are left, of those that have lost some.
        follow_freeze (bool): See :func:`~fgc_mm.sites.gate_sites`.
        example: Outline of what it can be called with, or where it was found.
    """

    gate: Optional[dict]
    sites: list[str]
    widths: dict[str, int]
    follow_freeze: bool
    example: Any


def to_plain(gating: Gating) -> dict[str, Any]:
    """As data that a file can hold.

    Args:
        gating (Gating): Of a network that is gated by itself, not as a part of a model.
    """
    return dict(vars(gating), example=tree_map(_to_plain, gating.example))


def _to_plain(value: Any) -> Any:
    if isinstance(value, TensorLike):
        return dict(shape=list(value.shape), dtype=str(value.dtype).rpartition('.')[2])
    return value


def from_plain(data: Mapping[str, Any]) -> Gating:
    """What :func:`to_plain` was given.

    Args:
        data (Mapping): What it made; other keys are passed over.

    Raises:
        CheckpointError: If something is missing.
    """
    names = [entry.name for entry in fields(Gating)]
    if any(name not in data for name in names):
        raise CheckpointError(f'a gating must have {", ".join(names)}, and has {", ".join(data)}')
    known = {name: data[name] for name in names}
    return Gating(**dict(known, example=_from_plain(known['example'])))


def _from_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {'shape', 'dtype'} and value['dtype'] in _DTYPES:
            return TensorLike(tuple(int(n) for n in value['shape']), _DTYPES[value['dtype']])
        return {key: _from_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_from_plain(item) for item in value)
    return value


_DTYPES = {
    str(kind).rpartition('.')[2]: kind
    for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    + (torch.int64, torch.int32, torch.uint8, torch.bool)
}


def finder_of(gates: Gates) -> Callable[[nn.Module], Found]:
    """What finds the sites of a network, or of the model it is part of, as they were found when it
    got its gates.

    Args:
        gates (Gates): The gates it has or had.

    Raises:
        UsageError: If nobody knows how they were found.
    """
    example = gates.example
    if example is None:
        raise UsageError(
            'nobody knows what the network can be called with: its gates were put on sites by '
            'hand; use fgc_mm.gate(network, example)'
        )
    if isinstance(example, InModel):
        return partial(find_in_model, shape=example.shape)
    return partial(_find, example)


def _find(example: Any, network: nn.Module) -> Found:
    return find_sites(network, filled(example), modes=(False,))
