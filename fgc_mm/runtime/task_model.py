# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The task model inside its wrappers, and the arguments of its forward."""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from mmengine.model import is_model_wrapper


def unwrap(model: nn.Module) -> nn.Module:
    """The task model inside distributed wrappers."""
    while is_model_wrapper(model):
        model = model.module  # type: ignore[assignment]
    return model


def forward_argument(name: str, args: tuple, kwargs: dict, default: Any = None) -> Any:
    """One argument of ``forward(inputs, data_samples, mode)``.

    mmengine passes what the data preprocessor returns by name if it is a dict
    and by position otherwise.
    """
    if name in kwargs:
        return kwargs[name]
    position = ('inputs', 'data_samples', 'mode').index(name)
    return args[position] if position < len(args) else default
