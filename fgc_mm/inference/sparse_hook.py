# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The hook that switches sparse execution on for validation and testing."""

from __future__ import annotations

from typing import Optional

import torch.nn as nn
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from ..gates import find_gates
from ..nets import GatedBackbone
from ..runtime import unwrap
from .memory import keep_memory
from .sparse import disable_sparse, enable_sparse, prepare


@HOOKS.register_module()
class SparseInferenceHook(Hook):
    """Computes only open channels while a model is validated or tested.

    One line in a config, for any task, or ``tools/test.py --sparse``:

        >>> custom_hooks = [dict(type='SparseInferenceHook')]

    A gated backbone whose gates were all slimmed away runs with prepared weights
    and kernels. Before a test on a CPU :func:`keep_memory` is called.

    Args:
        channels_last (bool): See :func:`enable_sparse`. Defaults to True.
        granularity (int, optional): See :func:`enable_sparse`. Defaults to None.
        way (str): See :func:`enable_sparse`. Defaults to 'auto'.
    """

    def __init__(
        self, channels_last: bool = True, granularity: Optional[int] = None, way: str = 'auto'
    ) -> None:
        # Between two batches nobody changes weights.
        self.options = dict(
            channels_last=channels_last, granularity=granularity, way=way, constant=True
        )

    def before_val(self, runner: Runner) -> None:
        """Switch it on."""
        model = unwrap(runner.model)
        if find_gates(model) or not has_gated_backbone(model):
            enable_sparse(model, **self.options)  # type: ignore[arg-type]
            return
        prepare(model, **self.options)  # type: ignore[arg-type]
        print_log(
            'SparseInferenceHook: no gate is left in the backbone, nothing is ever closed; it runs '
            'dense, with prepared weights',
            logger='current',
        )

    def before_test(self, runner: Runner) -> None:
        """Switch it on; the process has nothing else to do."""
        self.before_val(runner)
        if next(unwrap(runner.model).parameters()).device.type == 'cpu':
            keep_memory()

    def after_val(self, runner: Runner) -> None:
        """Switch it off again."""
        disable_sparse(unwrap(runner.model))

    after_test = after_val


def has_gated_backbone(model: nn.Module) -> bool:
    """Whether a model has a backbone that gates fit into, with or without any."""
    return any(isinstance(module, GatedBackbone) for module in model.modules())


def add_sparse_hook(cfg: Config) -> None:
    """Add the hook to a config that does not have it."""
    hooks = list(cfg.get('custom_hooks') or [])
    if not any(str(hook.get('type')).endswith('SparseInferenceHook') for hook in hooks):
        cfg.custom_hooks = [*hooks, dict(type='SparseInferenceHook')]
