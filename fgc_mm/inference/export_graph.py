# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a model computes with while it is recorded for export.

Gates need nothing of this: they decide in hooks, which are recorded as all that runs is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch import Tensor

from ..gates import find_gates


@contextmanager
def recordable(model: nn.Module) -> Iterator[None]:
    """Have a model compute with operations that an exported graph can hold.

    Adaptive average pooling is written as a product of matrices, which needs no fixed image size.
    Afterward the model is as before.

    Args:
        model (nn.Module): Any model.
    """
    pools = [m for m in model.modules() if type(m) is nn.AdaptiveAvgPool2d and _splits(m)]
    take_masks(model)
    try:
        for pool in pools:
            pool.forward = MatrixPool(pool)  # type: ignore[method-assign,assignment]
        yield
    finally:
        for pool in pools:
            pool.__dict__.pop('forward', None)


def take_masks(model: nn.Module) -> dict[str, Tensor]:
    """Name of each gate that has decided -> B x C, its mask; the gates forget the pass.

    torch.export refuses modules that keep tensors of a pass.

    Args:
        model (nn.Module): Any model.
    """
    masks = {}
    for name, gate in find_gates(model).items():
        record = gate.pass_record
        if record is not None:
            masks[name] = record.mask
        gate.record, gate.multiplier, gate.records = None, None, []
    return masks


def _splits(pool: nn.AdaptiveAvgPool2d) -> bool:
    """Whether a pooling gives more than the mean of the whole map."""
    size = pool.output_size
    return any(side not in (1, None) for side in (size if isinstance(size, tuple) else (size,)))


class MatrixPool:
    """``forward`` of adaptive average pooling, for image sizes not known yet.

    A cell is the mean of rows ``floor(i H / n)`` to ``ceil((i + 1) H / n)``, and
    of columns alike; both means are products with a matrix.

    Args:
        pool (nn.AdaptiveAvgPool2d): The module.
    """

    def __init__(self, pool: nn.AdaptiveAvgPool2d) -> None:
        size = pool.output_size
        self.height, self.width = size if isinstance(size, tuple) else (size, size)

    def __call__(self, x: Tensor) -> Tensor:
        if self.width is not None:
            x = x @ _means(x, 3, self.width).transpose(0, 1)
        return x if self.height is None else _means(x, 2, self.height) @ x


def _means(x: Tensor, dim: int, cells: int) -> Tensor:
    """cells x length, rows that take the mean of a cell."""
    length = x.shape[dim]
    cell = torch.arange(cells, device=x.device)[:, None]
    place = torch.arange(length, device=x.device)[None]
    # floor and ceil of quotients, in whole numbers
    begin = cell * length // cells
    end = ((cell + 1) * length + cells - 1) // cells
    inside = ((place >= begin) & (place < end)).to(x.dtype)
    return inside / inside.sum(dim=1, keepdim=True)
