# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How the sites of a gated network were found, so that they can be found again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Optional, Union

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import CheckpointError, UsageError
from .container import Gates
from .find import Example, find_in_model
from .finder import Found


def outline(example: Example) -> Any:
    """An example without the values of its tensors, as data that a file can hold.

    Args:
        example (Tensor | Sequence | Mapping): What a network can be called with.
    """
    return tree_map(
        lambda value: (
            dict(shape=list(value.shape), dtype=str(value.dtype).rpartition('.')[2])
            if isinstance(value, Tensor)
            else value
        ),
        example,
    )


def filled(example: Any) -> Example:
    """An example of the outline of one, with zeros.

    Args:
        example: What :func:`outline` made.
    """
    if isinstance(example, Mapping):
        if set(example) == {'shape', 'dtype'} and example['dtype'] in _DTYPES:
            return torch.zeros([int(n) for n in example['shape']], dtype=_DTYPES[example['dtype']])
        return {key: filled(item) for key, item in example.items()}
    if isinstance(example, (list, tuple)):
        return type(example)(map(filled, example))
    return example


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


def from_plain(data: Mapping[str, Any]) -> Gating:
    """A gating of what a file has of it.

    Args:
        data (Mapping): Its attributes; other keys are passed over.

    Raises:
        CheckpointError: If something is missing.
    """
    names = [entry.name for entry in fields(Gating)]
    if any(name not in data for name in names):
        raise CheckpointError(f'a gating must have {", ".join(names)}, and has {", ".join(data)}')
    return Gating(**{name: data[name] for name in names})


_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}


def example_of(gates: Gates) -> Union[Example, Callable[[nn.Module], Found]]:
    """What a network can be called with, or what finds the sites of the model it is part of.

    Args:
        gates (Gates): The gates it has or had.

    Raises:
        UsageError: If nobody knows.
    """
    if gates.example is None:
        raise UsageError(
            'nobody knows what the network can be called with: its gates were put on sites by '
            'hand; use fgc_mm.gate(network, example)'
        )
    if isinstance(gates.example, InModel):
        return partial(find_in_model, shape=gates.example.shape)
    return filled(gates.example)
