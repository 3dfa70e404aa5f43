# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What tools/test.py prints and writes at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.dist import is_main_process

from ..files import write_files
from ..runtime.config.files import type_name
from ..tasks import TASKS


def add_macs_hook(cfg: Config) -> None:
    """Count executed MACs also where the config does not ask for it."""
    hooks = list(cfg.get('custom_hooks') or [])
    if not any(type_name(hook).endswith('GatedMACsHook') for hook in hooks):
        cfg.custom_hooks = [*hooks, dict(type='GatedMACsHook')]


def add_derived(metrics: dict[str, Any]) -> dict[str, Any]:
    """The figures as papers give them, beside those of the task packages.

    ``accuracy/top1`` of mmpretrain becomes ``error/top1`` as well (the same for
    any k), and ``aAcc`` of mmseg is ``pixel_accuracy``, all in percent.
    """
    derived: dict[str, Any] = {}
    for name, value in metrics.items():
        for task in TASKS.values():
            derived |= task.derived(name, value)
    return {**metrics, **derived}


def print_summary(metrics: dict[str, Any]) -> None:
    """One line a figure, after all the log."""
    if not is_main_process():
        return
    width = max(map(len, metrics), default=0)
    print('\nResults')
    for name, value in metrics.items():
        value = _plain(value)
        text = f'{value:.4g}' if isinstance(value, float) else str(value)
        print(f'  {name:<{width}}  {text}')


def dump(path: str | Path, content: dict[str, Any]) -> None:
    """Write figures as JSON, on the main process."""
    if is_main_process():
        write_files({path: json.dumps(content, indent=2, default=_plain) + '\n'})


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, 'tolist') else value
