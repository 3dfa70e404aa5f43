# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Accuracy against computation: the table and the figure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

_NOT_OF_THE_TASK = ('macs/', 'gates/')


@dataclass
class Point:
    """One network at one setting.

    Attributes:
        curve (str): The curve it is on, such as 'FGC'.
        setting (float): What was turned: target, rho or threshold.
        share (float): Executed share of the backbone's MACs.
        metric (float): The task's metric.
        notes (dict): Further figures. Defaults to none.
    """

    curve: str
    setting: float
    share: float
    metric: float
    notes: dict[str, Any] = field(default_factory=dict)


def task_metric(metrics: dict[str, Any], name: Optional[str] = None) -> str:
    """The name of the task's metric among the figures of a test.

    Args:
        metrics (dict): Name -> figure.
        name (str, optional): The wanted one. Defaults to None, the first that is
            not about computation.

    Raises:
        ValueError: If there is none of that name.
    """
    names = [key for key in metrics if not key.startswith(_NOT_OF_THE_TASK)]
    if name is not None and name not in metrics:
        raise ValueError(f'metric={name!r} is not among the figures; choose from {names}')
    if name is None and not names:
        raise ValueError(f'there is no metric of a task among the figures {sorted(metrics)}')
    return name or names[0]


def point_of(
    metrics: dict[str, Any], curve: str, setting: float, metric: Optional[str] = None, **notes: Any
) -> Point:
    """A point from the figures ``tools/test.py`` reports.

    Args:
        metrics (dict): Name -> figure.
        curve (str): The curve it is on.
        setting (float): What was turned.
        metric (str, optional): Name of the metric. Defaults to None, the first.
        notes: Further figures.
    """
    share = 1 - float(metrics['macs/pruning_ratio']) / 100
    return Point(curve, setting, share, float(metrics[task_metric(metrics, metric)]), notes)


def average(points: Sequence[Point]) -> list[tuple[Point, Optional[Point]]]:
    """Runs of one curve and setting, such as several seeds, joined.

    Args:
        points (Sequence[Point]): The runs.

    Returns:
        list[tuple]: Sorted, the mean and its standard error (None for a single run).
    """
    groups: dict[tuple[str, float], list[Point]] = {}
    for point in points:
        groups.setdefault((point.curve, point.setting), []).append(point)
    joined: list[tuple[Point, Optional[Point]]] = []
    for (curve, setting), group in sorted(groups.items()):
        shares, metrics = [p.share for p in group], [p.metric for p in group]
        mean = Point(curve, setting, statistics.mean(shares), statistics.mean(metrics))
        error = None
        if len(group) > 1:
            root = math.sqrt(len(group))
            error = Point(
                curve, setting, statistics.stdev(shares) / root, statistics.stdev(metrics) / root
            )
        joined.append((mean, error))
    return joined


def markdown_table(points: Sequence[Point], setting: str, metric: str) -> str:
    """One row for each curve and setting, mean +- standard error over its runs.

    Args:
        points (Sequence[Point]): The runs.
        setting (str): What was turned.
        metric (str): Name of the metric.
    """
    counts = {(p.curve, p.setting): 0 for p in points}
    for p in points:
        counts[p.curve, p.setting] += 1
    rows = [f'| curve | {setting} | MACs executed | {metric} | runs |', '| --- ' * 5 + '|']
    for mean, error in average(points):
        share, value = f'{100 * mean.share:.1f} %', f'{mean.metric:.4g}'
        if error is not None:
            share = f'{100 * mean.share:.1f} +- {100 * error.share:.1f} %'
            value += f' +- {error.metric:.2g}'
        count = counts[mean.curve, mean.setting]
        rows.append(f'| {mean.curve} | {mean.setting:g} | {share} | {value} | {count} |')
    return '\n'.join(rows) + '\n'


def draw(points: Sequence[Point], metric: str, path: Path, title: str = '') -> None:
    """The figure: a curve of means with its runs as dots.

    Args:
        points (Sequence[Point]): The runs.
        metric (str): Name of the metric.
        path (Path): Where to write it; the ending says the format.
        title (str): Over the figure. Defaults to ''.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    means = [mean for mean, _ in average(points)]
    for number, curve in enumerate(dict.fromkeys(p.curve for p in points)):
        line = sorted((m.share, m.metric) for m in means if m.curve == curve)
        axes.plot(*zip(*line, strict=True), marker='o', color=f'C{number}', label=curve)
        runs = [(p.share, p.metric) for p in points if p.curve == curve]
        shares, metrics = zip(*runs, strict=True)
        axes.scatter(shares, metrics, s=8, alpha=0.5, color=f'C{number}')
    axes.set_xlabel("executed share of the backbone's MACs")
    axes.set_ylabel(metric)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def write(
    points: Sequence[Point], setting: str, metric: str, folder: Path, name: str, title: str = ''
) -> str:
    """Write ``<name>.json``, ``.md`` and ``.png`` into a folder.

    Args:
        points (Sequence[Point]): The runs.
        setting (str): What was turned.
        metric (str): Name of the metric.
        folder (Path): Where to.
        name (str): Name of the files.
        title (str): Over the figure. Defaults to ''.

    Returns:
        str: The table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = markdown_table(points, setting, metric)
    content = dict(setting=setting, metric=metric, points=[asdict(p) for p in points])
    (folder / f'{name}.json').write_text(json.dumps(content, indent=2) + '\n')
    (folder / f'{name}.md').write_text(table)
    draw(points, metric, folder / f'{name}.png', title)
    return table
