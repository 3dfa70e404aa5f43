# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Settings of a Runner that nobody names when they are wrong."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any, Optional, Union

from mmengine.config import Config

from ...errors import UsageError
from ...tasks import scopes
from ..messages import did_you_mean
from .argument_types import describe, fits

_TOGETHER = (
    ('train_dataloader', 'train_cfg', 'optim_wrapper'),
    ('val_dataloader', 'val_cfg', 'val_evaluator'),
    ('test_dataloader', 'test_cfg', 'test_evaluator'),
)
_LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
# Key -> type and least value. mmengine and torch find these late, or fail over them elsewhere.
_NUMBERS: dict[str, tuple[Any, Optional[float]]] = {
    'train_cfg.max_epochs': (int, 1),
    'train_cfg.max_iters': (int, 1),
    'train_cfg.val_interval': (int, 1),
    'optim_wrapper.optimizer.lr': (float, 0),
    'optim_wrapper.optimizer.weight_decay': (float, 0),
    'optim_wrapper.accumulative_counts': (int, 1),
    'optim_wrapper.clip_grad.max_norm': (float, 0),
    'auto_scale_lr.base_batch_size': (int, 1),
    'randomness.seed': (Optional[int], 0),
    **{f'{loader}.batch_size': (Optional[int], 1) for loader in _LOADERS},
    **{f'{loader}.num_workers': (int, 0) for loader in _LOADERS},
}


def check_run_settings(cfg: Config) -> None:
    """See that numbers and names every run has are possible."""
    for key, (hint, least) in _NUMBERS.items():
        found, value = _get(cfg, key)
        if found:
            _check_number(key, value, hint, least)
    for keys in _TOGETHER:
        lacking = [key for key in keys if cfg.get(key) is None]
        if 0 < len(lacking) < len(keys):
            raise UsageError(
                f'the config has no {" and no ".join(lacking)}: {", ".join(keys)} go together; set '
                'all of them, or all to None'
            )
    level = cfg.get('log_level', 'INFO')
    if isinstance(level, str) and not isinstance(logging.getLevelName(level), int):
        raise UsageError(f'log_level={level!r} must be DEBUG, INFO, WARNING or ERROR')
    scope = cfg.get('default_scope')
    if scope is not None and not _is_installed(scope):
        there = [known for known in (*scopes(), 'mmengine') if _is_installed(known)]
        raise UsageError(
            f'default_scope={scope!r} names no installed package'
            f'{did_you_mean(scope, there) or "."} Those there are: {", ".join(map(repr, there))}'
        )


def _get(cfg: Union[Config, Mapping], key: str) -> tuple[bool, Any]:
    node: Any = cfg
    for part in key.split('.'):
        if not isinstance(node, (Config, Mapping)) or part not in node:
            return False, None
        node = node[part]
    return True, node


def _check_number(key: str, value: Any, hint: Any, least: Optional[float]) -> None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as mmengine takes 1e5 for iterations
    wrong = not fits(value, hint)
    if not wrong and value is not None and least is not None:
        wrong = not value >= least
    if wrong:
        bound = '' if least is None else f', {least:g} or more'
        raise UsageError(f'{key}={value!r} must be {describe(hint)}{bound}')


def _is_installed(scope: Any) -> bool:
    try:
        return importlib.util.find_spec(str(scope)) is not None
    except (ImportError, ValueError):
        return False
