# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The hook that freezes a model for validation and testing."""

from __future__ import annotations

from typing import Any, Optional

import torch.nn as nn
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import BaseTTAModel
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from ..gates import find_gates
from ..runtime import unwrap
from ..runtime.config.files import type_name
from .freeze import Freezer
from .memory import keep_memory


@HOOKS.register_module()
class SparseInferenceHook(Hook):
    """Computes only open channels while a model is validated or tested.

    One line in a config, for any task, or ``tools/test.py --sparse``:

        >>> custom_hooks = [dict(type='SparseInferenceHook')]

    The model is frozen before, see :func:`~fgc_mm.freeze`, and as it was after. Before a test
    on a CPU :func:`keep_memory` is called.

    Args:
        channels_last (bool): See :func:`~fgc_mm.freeze`. Defaults to True.
        way (str): See :func:`~fgc_mm.freeze`. Defaults to 'auto'.
    """

    # After EMAHook has put its weights in, and for the time until it takes them out.
    priority = 'LOW'

    def __init__(self, channels_last: bool = True, way: str = 'auto') -> None:
        self.options: dict[str, Any] = dict(channels_last=channels_last, way=way)
        self.freezer: Optional[Freezer] = None

    def before_val_epoch(self, runner: Runner) -> None:
        """Freeze the model."""
        if not find_gates(runner.model):
            print_log(
                'SparseInferenceHook: no gate is left in the model, nothing is ever closed; it '
                'runs dense, with its norms folded in',
                logger='current',
            )
        self.freezer = Freezer(_model_of(runner), **self.options)
        self.freezer.attach()

    def before_test_epoch(self, runner: Runner) -> None:
        """Freeze the model; the process has nothing else to do."""
        self.before_val_epoch(runner)
        if next(unwrap(runner.model).parameters()).device.type == 'cpu':
            keep_memory()

    def after_val_epoch(self, runner: Runner, metrics: Optional[dict] = None) -> None:
        """The model as it was."""
        if self.freezer is not None:
            masked = self.freezer.report.masked
            if masked:
                print_log(f'SparseInferenceHook: {self.freezer.report}', logger='current')
            self.freezer.remove()
            self.freezer = None

    after_test_epoch = after_val_epoch


def _model_of(runner: Runner) -> nn.Module:
    """The model that is called with pictures."""
    model = unwrap(runner.model)
    return unwrap(model.module) if isinstance(model, BaseTTAModel) else model


def add_sparse_hook(cfg: Config) -> None:
    """Add the hook to a config that does not have it."""
    hooks = list(cfg.get('custom_hooks') or [])
    if not any(type_name(hook).endswith('SparseInferenceHook') for hook in hooks):
        cfg.custom_hooks = [*hooks, dict(type='SparseInferenceHook')]
