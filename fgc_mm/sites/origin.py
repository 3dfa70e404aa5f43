# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How the sites of a gated network were found, so that they can be found again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import UsageError
from .attach import Gates
from .find import Example, Found, find_sites


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


def sites_of(gates: Gates, network: nn.Module) -> Found:
    """Find the sites of a network anew, as they were found when it got its gates.

    Args:
        gates (Gates): The gates it has or had.
        network (nn.Module): The network, without gates.

    Raises:
        UsageError: If nobody knows how they were found.
    """
    if gates.example is None:
        raise UsageError(
            f'nobody knows what {type(network).__name__} can be called with: its gates were put on '
            'sites by hand; use fgc_mm.gate(network, example)'
        )
    return find_sites(network, filled(gates.example), modes=(False,))
