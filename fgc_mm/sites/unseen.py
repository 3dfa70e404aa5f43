# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What goes past the operations of a pass: numbers that Python reads, functions that compute by
themselves, tensors in objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Looks(TorchFunctionMode):
    """Sees the ways from a tensor to Python that are no operation.

    Args:
        note (Callable): Called with such a tensor.
    """

    NAMES = ('numpy', 'tolist', '__array__', '__dlpack__')

    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, '__name__', '') in self.NAMES:
            self.note(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def custom_functions(run: Callable) -> Iterator[None]:
    """Let ``run(name, forward, ctx, ...)`` run the custom functions of autograd.

    Those of mmcv, such as deformable convolutions and RoIAlign, work past the dispatcher.
    """
    before = {
        kind: vars(kind)['forward']
        for kind in _subclasses(torch.autograd.Function)
        if 'forward' in vars(kind) and not kind.__module__.startswith('torch.')
    }
    try:
        for kind in before:
            forward = staticmethod(partial(run, kind.__name__, kind.forward))
            kind.forward = forward  # type: ignore[method-assign, assignment]
        yield
    finally:
        for kind, own in before.items():
            kind.forward = own


def _subclasses(kind: type) -> list[Any]:
    children: list[Any] = kind.__subclasses__()
    return [c for child in children for c in (child, *_subclasses(child))]


def attributes(module: nn.Module) -> list[Any]:
    """What a module keeps outside of its parameters, buffers and children."""
    ours = vars(nn.Module())
    return [v for k, v in vars(module).items() if k not in ours and not isinstance(v, nn.Module)]


def tensors_in(value: Any, seen: Optional[set[int]] = None) -> list[Tensor]:
    """All tensors in lists, dicts, data samples and other objects."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return [value]
    if id(value) in seen or isinstance(value, (nn.Module, type, str, bytes, np.ndarray)):
        return []
    seen.add(id(value))
    inside: Any = getattr(value, '__dict__', {})
    if hasattr(value, 'all_items'):
        inside = dict(value.all_items())
    elif isinstance(value, Mapping):
        inside = value
    elif isinstance(value, (list, tuple, set)):
        inside = dict(enumerate(value))
    return [t for item in list(inside.values()) for t in tensors_in(item, seen)]
