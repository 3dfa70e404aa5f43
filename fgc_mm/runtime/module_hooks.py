# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Forward hooks that stay where they were put."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch.nn as nn
from torch import Tensor
from torch.utils.hooks import RemovableHandle


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
    """The forward hooks one owner has put on a model, to be removed together."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def before(self, module: nn.Module, func: Callable, with_kwargs: bool = False) -> None:
        """Call ``func`` before each forward of the module."""
        hook = Callback(func)
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=with_kwargs))

    def after(
        self, module: nn.Module, func: Callable, with_kwargs: bool = False, first: bool = False
    ) -> None:
        """Call ``func`` after each forward of the module, before all others if ``first``."""
        hook = Callback(func)
        handle = module.register_forward_hook(hook, with_kwargs=with_kwargs, prepend=first)
        self._handles.append(handle)

    def remove(self) -> None:
        """Take all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __bool__(self) -> bool:
        return bool(self._handles)
