# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What tools/test.py prints and writes at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.runner import Runner

from ..files import write_files
from ..tasks import TASKS


def add_macs_hook(cfg: Config) -> None:
    """Count executed MACs also where the config does not ask for it."""
    hooks = list(cfg.get('custom_hooks') or [])
    if not any(str(hook.get('type')).endswith('GatedMACsHook') for hook in hooks):
        cfg.custom_hooks = [*hooks, dict(type='GatedMACsHook')]


def layer_table(runner: Runner) -> list[dict]:
    """The rows of the per-layer table, empty for a network without gates."""
    for metric in runner.test_evaluator.metrics:
        rows = getattr(metric, 'layer_table', None)
        if rows is not None:
            return rows
    return []


def add_derived(metrics: dict[str, Any]) -> dict[str, Any]:
    """The figures as papers give them, beside those of the task packages.

    ``accuracy/top1`` of mmpretrain becomes ``error/top1`` as well (the same for
    any k), and ``aAcc`` of mmseg is ``pixel_accuracy``, all in percent.

    Args:
        metrics (dict): What the evaluator returned. It is left as it is.

    Returns:
        dict: The same figures and the derived ones.
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
        print(f'  {name:<{width}}  {_readable(value)}')


def write_json(
    path: str, runner: Runner, config: str, checkpoint: str, metrics: dict, **more: Any
) -> None:
    """Write the figures of a test, and whatever else is to be kept, as JSON."""
    tested = dict(config=config, checkpoint=checkpoint, **more)
    dump(path, dict(**tested, metrics=metrics, layers=layer_table(runner)))


def dump(path: str | Path, content: dict[str, Any]) -> None:
    """Write figures as JSON, on the main process."""
    if not is_main_process():
        return
    write_files({path: json.dumps(content, indent=2, default=_plain) + '\n'})


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, 'tolist') else value


def _readable(value: Any) -> str:
    value = _plain(value)
    return f'{value:.4g}' if isinstance(value, float) else str(value)
