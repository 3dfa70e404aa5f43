# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Curves of trainings, from the logs in their work dirs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from matplotlib.figure import Figure

from ..errors import UsageError
from . import style
from .gate_table import short_name

Curve = list[tuple[int, float]]
Curves = dict[str, Curve]
"""Name as logged -> (iteration, value)."""

UNITS = {
    'losses': 'loss',
    'openness of the gates': 'share of open channels',
    'neighbor overlap': 'share of shared neighbors',
    'neighbor turnover': 'share of changed neighbors',
    'budget': 'share of MACs executed',
    'weight of the budget': 'weight of loss_budget',
}
"""Panel -> what its vertical axis shows."""
_PREFIXES = {
    'gate/openness': 'openness of the gates',
    'fgc/overlap': 'neighbor overlap',
    'fgc/turnover': 'neighbor turnover',
    'budget': 'budget',
}
_SUMS = ('loss', 'loss_task', 'loss_l0', 'loss_fgc', 'loss_budget')
_NOT_CURVES = ('epoch', 'iter', 'step', 'time', 'data_time', 'memory', 'base_lr')


def read_curves(work_dir: Path) -> Curves:
    """Everything a run logged while training, over iterations.

    A run that was resumed has several logs: later ones replace what earlier
    ones have from the same iteration on.
    """
    if not work_dir.is_dir():
        raise UsageError(f'work dir {work_dir} does not exist')
    curves: dict[str, dict[int, float]] = {}
    for rows in _logs(work_dir):
        first = min((row['step'] for row in rows if 'iter' in row), default=None)
        if first is None:
            continue
        for values in curves.values():
            for step in [step for step in values if step >= first]:
                del values[step]
        for row in filter(_of_training, rows):
            for key, value in row.items():
                if key not in _NOT_CURVES and isinstance(value, (int, float)):
                    curves.setdefault(key, {})[row['step']] = float(value)
    found = {name: sorted(values.items()) for name, values in curves.items() if values}
    if not found:
        raise UsageError(
            f'work dir {work_dir} holds no log of a training (*/vis_data/scalars.json); name the '
            'folder that tools/train.py wrote to, with the LocalVisBackend of the configs'
        )
    return found


def last_validation(work_dir: Path) -> dict[str, float]:
    """The metrics that the last validation of a run logged, empty without one."""
    rows = [row for rows in _logs(work_dir) for row in rows if not _of_training(row)]
    return {k: v for row in rows[-1:] for k, v in row.items() if k not in _NOT_CURVES}


def _logs(work_dir: Path) -> list[list[dict[str, Any]]]:
    """The rows of each log of a run."""
    logs = []
    for path in sorted(work_dir.glob('*/vis_data/scalars.json')):
        rows = []
        for line in path.read_text(encoding='utf-8').splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # the last line of a run that was stopped
        logs.append([row for row in rows if isinstance(row, dict) and 'step' in row])
    return logs


def _of_training(row: Mapping[str, Any]) -> bool:
    """Whether its step is an iteration; that of a validation may be an epoch."""
    return 'iter' in row or any(key.startswith(('gate/', 'fgc/', 'budget/')) for key in row)


def panels(curves: Mapping[str, Curves]) -> dict[str, list[str]]:
    """What is drawn together: title -> names of the curves that any run has."""
    found: dict[str, list[str]] = {title: [] for title in UNITS}
    for name in dict.fromkeys(name for own in curves.values() for name in own):
        title = _panel(name)
        if title is not None:
            found[title].append(name)
    # What sums up a panel comes first, whatever was logged first.
    return {title: sorted(own, key=is_detail) for title, own in found.items() if own}


def _panel(name: str) -> Optional[str]:
    if name.rpartition('.')[2].startswith('loss'):
        return 'losses'
    if name == 'budget/weight':  # not a share, and up to 4
        return 'weight of the budget'
    return next((title for start, title in _PREFIXES.items() if name.startswith(start)), None)


def curve_label(name: str, names: Sequence[str]) -> str:
    """A logged name without what the panel's title says already."""
    for prefix in _PREFIXES:
        if name == prefix:
            return 'all gates'
        if name.startswith(f'{prefix}/'):
            rest = name[len(prefix) + 1 :]
            others = [n[len(prefix) + 1 :] for n in names if n.startswith(f'{prefix}/')]
            return short_name(rest, others) if '.' in rest else rest
    return name


def is_detail(name: str) -> bool:
    """Whether a curve is left out where runs are compared: it is a part of another."""
    if name.startswith(('gate/', 'fgc/')):
        return name.count('/') > 1
    return name.rpartition('.')[2].startswith('loss') and name not in _SUMS


def training_figure(curves: Mapping[str, Curves]) -> Figure:
    """A panel for losses, openness, overlap and turnover each.

    With one run colors are curves; with several they are runs, and only the
    total loss and the means over all gates are drawn.
    """
    several = len(curves) > 1
    parts = {
        title: [name for name in names if not (several and is_detail(name))]
        for title, names in panels(curves).items()
    }
    parts = {title: names for title, names in parts.items() if names}
    with style.figure(8.5, 2.6 * len(parts) + 0.4) as figure:
        axes = figure.subplots(len(parts), squeeze=False, sharex=True).ravel()
        for place, (title, names) in zip(axes, parts.items(), strict=True):
            for number, (run, own) in enumerate(curves.items()):
                for index, name in enumerate(names):
                    if name not in own:
                        continue
                    label = curve_label(name, names)
                    if several:
                        label = run if len(names) == 1 else f'{run}: {label}'
                    look = _look(number, index, several, name)
                    if len(own[name]) == 1:  # a line would have no length
                        look.update(marker='o', markersize=4)
                    place.plot(*zip(*own[name], strict=True), label=label, **look)
            place.set(title=title, ylabel=UNITS[title])
            place.grid(True)
            if title == 'losses':
                place.set_yscale('symlog', linthresh=1e-3)
            place.legend(loc='center left', bbox_to_anchor=(1, 0.5))
        axes[-1].set_xlabel('iteration')
    return figure


def _look(run: int, index: int, several: bool, name: str) -> dict[str, Any]:
    lines: tuple[Any, ...] = ('-', '--', ':', '-.', (0, (6, 2, 1, 2, 1, 2)))
    if several:
        return dict(color=style.RUNS[run % len(style.RUNS)], linestyle=lines[index % 5])
    turn, color = divmod(index, len(style.CLASSES))
    width = 1.8 if name == 'loss' or name in _PREFIXES else 1.0
    return dict(color=style.CLASSES[color], linestyle=lines[turn % 5], linewidth=width)


def analyze_training(work_dirs: Mapping[str, Path], out_dir: Path) -> list[Path]:
    """Write ``training.csv`` and the figure."""
    curves = {name: read_curves(folder) for name, folder in work_dirs.items()}
    rows = [
        dict(run=run, name=name, iteration=step, value=value)
        for run, own in curves.items()
        for name, points in own.items()
        for step, value in points
    ]
    written = [style.write_csv(rows, out_dir / 'training.csv')]
    return written + style.save(training_figure(curves), out_dir / 'training')
