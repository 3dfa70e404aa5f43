# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How the sites of a gated network were found, so that they can be found again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import UsageError
from .attach import Gates
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
