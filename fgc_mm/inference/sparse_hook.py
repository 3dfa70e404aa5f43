# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The hook that switches sparse execution on for validation and testing."""

from __future__ import annotations

from typing import Optional

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from ..engine import unwrap
from .sparse import disable_sparse, enable_sparse


@HOOKS.register_module()
class SparseInferenceHook(Hook):
    """Computes only open channels while a model is validated or tested.

    One line in a config, for any task, or ``tools/test.py --sparse``:

        >>> custom_hooks = [dict(type='SparseInferenceHook')]

    Args:
        channels_last (bool): See :func:`enable_sparse`. Defaults to True.
        granularity (int, optional): See :func:`enable_sparse`. Defaults to None.
        way (str): See :func:`enable_sparse`. Defaults to 'auto'.
    """

    def __init__(
        self, channels_last: bool = True, granularity: Optional[int] = None, way: str = 'auto'
    ) -> None:
        self.options = dict(channels_last=channels_last, granularity=granularity, way=way)

    def before_val(self, runner: Runner) -> None:
        """Switch it on."""
        enable_sparse(unwrap(runner.model), **self.options)  # type: ignore[arg-type]

    before_test = before_val

    def after_val(self, runner: Runner) -> None:
        """Switch it off again."""
        disable_sparse(unwrap(runner.model))

    after_test = after_val


def add_sparse_hook(cfg: Config) -> None:
    """Add the hook to a config that does not have it."""
    hooks = list(cfg.get('custom_hooks') or [])
    if not any(str(hook.get('type')).endswith('SparseInferenceHook') for hook in hooks):
        cfg.custom_hooks = [*hooks, dict(type='SparseInferenceHook')]
