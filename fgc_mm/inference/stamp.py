# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Noticing that tensors have changed since something was computed from them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from operator import attrgetter, eq, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

Source = tuple[dict[str, Any], str]
"""A parameter, buffer or attribute by the dict of its module and its key there."""


class _Checks(threading.local):
    """What is known in a pass, by its thread.

    Attributes:
        done (bool): Whether all stamps were looked at. Looking at all of them in a row
            takes a fraction of the time that looking at each before its layer does,
            between two large convolutions.
        apart (WeakSet): Of the others, convolutions that do not do the work of their norm.
    """

    done = False

    def __init__(self) -> None:
        self.apart: weakref.WeakSet = weakref.WeakSet()


checks = _Checks()


class Stamp:
    """What some parameters, buffers and attributes were like at a time.

    A change is noticed when one was written to or replaced, which its version
    counter or address tells. On CPU also what is written through ``.data``, which
    tells neither: all values are compared, of the weights of convolutions one of
    each output and one of each input channel. Of anything else a replacement is noticed.

    Args:
        sources (Sequence[tuple]): Where they are, see ``Source``.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._owners = [owner for owner, _ in sources]
        self._keys = [key for _, key in sources]
        self._found = [owner.get(key) for owner, key in sources]
        self._tensors = [found for found in self._found if isinstance(found, Tensor)]
        # Tensors made in inference mode have no version counter.
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        views = [view for tensor in self._tensors for view in _samples(tensor)]
        self._whole = [view for view in views if view.flags.c_contiguous]
        self._spread = [view for view in views if not view.flags.c_contiguous] or [_NOTHING]
        # A bytearray is compared with the memory of an array itself, without a copy.
        self._contents = list(map(bytearray, self._whole))
        self._samples = bytearray(np.concatenate(self._spread))

    def holds(self) -> bool:
        """Whether they are still the same. Runs once per pass for all layers, so
        each step is one call for all tensors."""
        return (
            all(map(is_, map(dict.get, self._owners, self._keys), self._found))
            and list(map(_version, self._counted)) == self._versions
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and self._samples == np.concatenate(self._spread)
            and all(map(eq, self._contents, self._whole))
        )


_version = attrgetter('_version')
_NOTHING = np.empty(0, 'u1')


def _samples(tensor: Tensor) -> list[np.ndarray]:
    """Views of what is compared of a tensor: none if it is elsewhere or lies oddly."""
    if tensor.device.type != 'cpu' or not tensor.numel():
        return []
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    rows, columns = (*tensor.shape, 1, 1)[:2]
    last = tensor.dim() == 4 and not tensor.is_contiguous()
    if last:
        tensor = tensor.permute(0, 2, 3, 1)  # as channels-last lies in memory
    if not tensor.is_contiguous():
        return []
    flat = tensor.numpy().reshape(-1)
    flat = flat.view(f'u{flat.itemsize}')  # as nan differs from itself
    if tensor.dim() != 4:
        return [flat]
    kernel = len(flat) // (rows * columns)
    values = flat if last else flat[kernel // 2 :: kernel]
    # One of each row, at the column before that of the last: of all columns, if there are not
    # more of them. Rows are far apart and each costs a cache miss, neighbors cost little.
    spread = values[:: max(len(values) // rows - 1, 1)]
    return [spread] if rows >= columns else [spread, values[:columns]]
