# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The task model inside its wrappers, and the arguments of its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from mmengine.model import is_model_wrapper
from torch import Tensor


def unwrap(model: nn.Module) -> nn.Module:
    """The task model inside distributed wrappers."""
    while is_model_wrapper(model):
        model = model.module  # type: ignore[assignment]
    return model


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """A module in evaluation mode; behind it every part of it is in its own again."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def one_batch(inputs: Any) -> Tensor:
    """The pictures of a batch as one tensor; a plain data preprocessor leaves them in a list."""
    return inputs if isinstance(inputs, Tensor) else torch.stack(list(inputs))


def forward_argument(name: str, args: tuple, kwargs: dict, default: Any = None) -> Any:
    """One argument of ``forward(inputs, data_samples, mode)``.

    mmengine passes what the data preprocessor returns by name if it is a dict
    and by position otherwise.
    """
    if name in kwargs:
        return kwargs[name]
    position = ('inputs', 'data_samples', 'mode').index(name)
    return args[position] if position < len(args) else default
