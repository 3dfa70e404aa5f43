# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Noticing that tensors have changed since something was computed from them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

SAMPLES = 8

Source = tuple[dict[str, Any], str]
"""A parameter or buffer by the dict of its module and its key there."""


class _Checks(threading.local):
    """Whether all stamps were looked at in this pass, by its thread.

    Looking at all of them in a row takes a fraction of the time that looking at
    each before its layer does, between two large convolutions.
    """

    done = False


checks = _Checks()


class Stamp:
    """What some parameters and buffers were like at a time.

    A change is noticed when one was written to or replaced, which its version
    counter or address tells; on CPU also when some elements differ, which
    catches what was written through ``.data``.

    Args:
        sources (Sequence[tuple]): The tensors, see ``Source``.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.known = [(owner, key, *_state(owner.get(key))) for owner, key in sources]

    def holds(self) -> bool:
        """Whether they are still the same. Runs once per layer and pass."""
        for owner, key, tensor, address, version, view, content in self.known:
            if owner.get(key) is not tensor:
                return False
            if tensor is None:
                continue
            if tensor.data_ptr() != address:
                return False
            if version is not None and tensor._version != version:
                return False
            if view is not None and view.tobytes() != content:
                return False
        return True


def _state(tensor: Optional[Tensor]) -> tuple:
    if tensor is None:
        return None, 0, None, None, b''
    # Tensors made in inference mode have no version counter.
    version = None if tensor.is_inference() else tensor._version
    view = _sample(tensor)
    return tensor, tensor.data_ptr(), version, view, b'' if view is None else view.tobytes()


def _sample(tensor: Tensor) -> Optional[np.ndarray]:
    """A view of a few elements spread over a tensor."""
    if tensor.device.type != 'cpu':
        return None
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    if tensor.dim() == 4 and not tensor.is_contiguous():
        tensor = tensor.permute(0, 2, 3, 1)  # as channels-last lies in memory
    if not tensor.is_contiguous():
        return None
    flat = tensor.numpy().reshape(-1)
    # About one of each output channel, at different inputs: an odd step meets all.
    samples = max(SAMPLES, tensor.size(0) if tensor.dim() > 1 else 0)
    return flat[:: max(len(flat) // samples, 1) | 1]
