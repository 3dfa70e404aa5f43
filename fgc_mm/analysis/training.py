# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Curves of trainings, from the logs in their work dirs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..errors import UsageError
from . import style
from .gate_table import short_name
from .tables import write_csv

Curve = list[tuple[int, float]]
Curves = dict[str, Curve]
"""Name as logged -> (iteration, value)."""

_NOT_CURVES = ('epoch', 'iter', 'step', 'time', 'data_time', 'memory', 'base_lr')


def read_curves(work_dir: Path) -> Curves:
    """Everything a run logged while training, over iterations.

    A run that was resumed has several logs: later ones replace what earlier
    ones have from the same iteration on.
    """
    if not work_dir.is_dir():
        raise UsageError(f'work dir {work_dir} does not exist')
    curves: dict[str, dict[int, float]] = {}
    for path in sorted(work_dir.glob('*/vis_data/scalars.json')):
        rows = _rows(path)
        steps = [row['step'] for row in rows if 'iter' in row]
        if not steps:
            continue
        for values in curves.values():
            for step in [step for step in values if step >= min(steps)]:
                del values[step]
        for row in rows:
            if 'iter' not in row and not any(key.startswith(_BY_ITER) for key in row):
                continue  # a validation: its step is an epoch or an iteration
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


_BY_ITER = ('gate/', 'fgc/', 'budget/')


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(encoding='utf-8').splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the last line of a run that was stopped
    return [row for row in rows if isinstance(row, dict) and 'step' in row]


def last_validation(work_dir: Path) -> dict[str, float]:
    """The metrics that the last validation of a run logged, empty without one."""
    found: dict[str, float] = {}
    for path in sorted(work_dir.glob('*/vis_data/scalars.json')):
        for row in _rows(path):
            if 'macs/pruning_ratio' in row or not ('iter' in row or 'loss' in row):
                if any(key.startswith(_BY_ITER) for key in row):
                    continue
                found = {k: v for k, v in row.items() if k not in _NOT_CURVES}
    return found


def panels(curves: Mapping[str, Curves]) -> dict[str, list[str]]:
    """What is drawn together: title -> names of the curves that any run has."""
    names = list(dict.fromkeys(name for own in curves.values() for name in own))
    losses = [n for n in names if n == 'loss' or n.rpartition('.')[2].startswith('loss')]
    found = {
        'losses': losses,
        'openness of the gates': [n for n in names if n.startswith('gate/openness')],
        'neighbor overlap': [n for n in names if n.startswith('fgc/overlap')],
        'neighbor turnover': [n for n in names if n.startswith('fgc/turnover')],
        'budget': [n for n in names if n.startswith('budget/') and n not in _WEIGHTS],
        'weight of the budget': [n for n in names if n in _WEIGHTS],
    }
    # What sums up a panel comes first, whatever was logged first.
    return {title: sorted(own, key=is_detail) for title, own in found.items() if own}


def curve_label(name: str, names: Sequence[str]) -> str:
    """A logged name without what the panel's title says already."""
    for prefix in ('gate/openness', 'fgc/overlap', 'fgc/turnover', 'budget'):
        if name == prefix:
            return 'all gates'
        if name.startswith(f'{prefix}/'):
            rest = name[len(prefix) + 1 :]
            others = [n[len(prefix) + 1 :] for n in names if n.startswith(f'{prefix}/')]
            return short_name(rest, others) if '.' in rest else rest
    return name


def training_rows(curves: Mapping[str, Curves]) -> list[dict[str, Any]]:
    """A row for each run, name and iteration."""
    return [
        dict(run=run, name=name, iteration=step, value=value)
        for run, own in curves.items()
        for name, points in own.items()
        for step, value in points
    ]


def training_figure(curves: Mapping[str, Curves]) -> Figure:
    """A panel for losses, openness, overlap and turnover each.

    With one run colors are curves; with several they are runs, and only the
    total loss and the means over all gates are drawn.
    """
    parts = panels(curves)
    several = len(curves) > 1
    if several:
        parts = {t: [n for n in own if not is_detail(n)] for t, own in parts.items()}
        parts = {title: own for title, own in parts.items() if own}
    with style.style():
        figure = style.new_figure(8.5, 2.6 * len(parts) + 0.4)
        axes = figure.subplots(len(parts), squeeze=False, sharex=True).ravel()
        for place, (title, names) in zip(axes, parts.items(), strict=True):
            for number, (run, own) in enumerate(curves.items()):
                for index, name in enumerate(names):
                    if name not in own:
                        continue
                    look = _look(number, index, several, name)
                    if len(own[name]) == 1:  # a line would have no length
                        look.update(marker='o', markersize=4)
                    label = curve_label(name, names)
                    if several:
                        label = run if len(names) == 1 else f'{run}: {label}'
                    x, y = zip(*own[name], strict=True)
                    place.plot(x, y, label=label, **look)
            place.set_ylabel(UNITS[title])
            place.set_title(title)
            place.grid(True)
            if title == 'losses':
                place.set_yscale('symlog', linthresh=1e-3)
            place.legend(loc='center left', bbox_to_anchor=(1, 0.5))
        axes[-1].set_xlabel('iteration')
    return figure


UNITS = {
    'losses': 'loss',
    'openness of the gates': 'share of open channels',
    'neighbor overlap': 'share of shared neighbors',
    'neighbor turnover': 'share of changed neighbors',
    'budget': 'share of MACs executed',
    'weight of the budget': 'weight of loss_budget',
}
"""Panel -> what its vertical axis shows."""
_WEIGHTS = ('budget/weight',)  # not a share, and up to 4


def is_detail(name: str) -> bool:
    """Whether a curve is left out where runs are compared: it is a part of another."""
    if name.startswith(('gate/', 'fgc/')):
        return name.count('/') > 1
    return name.rpartition('.')[2].startswith('loss') and name not in (
        'loss',
        'loss_task',
        'loss_l0',
        'loss_fgc',
        'loss_budget',
    )


def _look(run: int, index: int, several: bool, name: str) -> dict[str, Any]:
    lines: tuple[Any, ...] = ('-', '--', ':', '-.', (0, (6, 2, 1, 2, 1, 2)))
    bold = 1.8 if name in ('loss', 'gate/openness', 'fgc/overlap', 'fgc/turnover') else 1.0
    if several:
        return dict(color=style.RUNS[run % len(style.RUNS)], linestyle=lines[index % 5])
    color = style.CLASSES[index % len(style.CLASSES)]
    line = lines[index // len(style.CLASSES) % 5]
    return dict(color=color, linestyle=line, linewidth=bold)


def analyze_training(work_dirs: Mapping[str, Path], out_dir: Path) -> list[Path]:
    """Write ``training.csv`` and the figure."""
    curves = {name: read_curves(folder) for name, folder in work_dirs.items()}
    written = [write_csv(training_rows(curves), out_dir / 'training.csv')]
    return written + style.save(training_figure(curves), out_dir / 'training')
