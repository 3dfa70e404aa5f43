# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The task model: its wrappers, its modes, and hooks that whoever has put them on takes off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

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


class Callback:
    """A forward hook that does not follow a copy of its module.

    ``copy.deepcopy`` and pickling of a module take its hooks along, and with
    them everything a hook refers to. In a copy this one does nothing.
    """

    def __init__(self, func: Optional[Callable] = None) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.func is None else self.func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Callback:
        return Callback()

    def __reduce__(self) -> tuple:
        return Callback, ()


def tell(module: nn.Module, x: Tensor, out: Tensor) -> None:
    """Call the forward hooks of a module that somebody else has run."""
    for hook in module._forward_hooks.values():
        hook(module, (x,), out)


class Attachments:
    """What one owner has put on models and other objects, to be taken off together."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def before(self, module: nn.Module, func: Callable, with_kwargs: bool = False) -> None:
        """Call ``func`` before each forward of the module."""
        hook = Callback(func)
        handle = module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
        self._undo.append(handle.remove)

    def after(
        self, module: nn.Module, func: Callable, with_kwargs: bool = False, first: bool = False
    ) -> None:
        """Call ``func`` after each forward of the module, before all others if ``first``."""
        hook = Callback(func)
        handle = module.register_forward_hook(hook, with_kwargs=with_kwargs, prepend=first)
        self._undo.append(handle.remove)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Let an attribute of an object be another."""
        own = vars(owner)
        self._undo.append(
            partial(setattr, owner, name, own[name])
            if name in own
            else partial(delattr, owner, name)
        )
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, func: Callable) -> None:
        """Call ``func(original, ...)`` in place of a method."""
        original = getattr(owner, name)
        wrapped = partial(func, original)
        vars(wrapped).update(vars(original))  # by which schedulers know their optimizer
        self.replace(owner, name, wrapped)

    def remove(self) -> None:
        """Take all of it off again."""
        while self._undo:
            self._undo.pop()()

    def __bool__(self) -> bool:
        return bool(self._undo)
