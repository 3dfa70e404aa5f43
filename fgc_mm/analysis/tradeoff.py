# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Metrics against executed MACs: tables and the figure of a trade-off."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from matplotlib.figure import Figure

from ..errors import UsageError
from ..files import write_files
from ..tasks import TASKS, main_metrics
from . import style

RATIO = 'macs/pruning_ratio'


@dataclass(frozen=True)
class Row:
    """The runs of one point.

    Attributes:
        label (str): The setting.
        series (str): The line it belongs to.
        metric (list[float]): The task's metric, one figure a run.
        ratio (list[float]): The pruning ratio in percent, likewise.
    """

    label: str
    series: str
    metric: list[float]
    ratio: list[float]


def task_metric(
    tests: Iterable[dict[str, Any]], wanted: Optional[str] = None, rising: bool = False
) -> str:
    """The name of the metric that tests are compared by.

    Args:
        tests (Iterable[dict]): The figures of each.
        wanted (str, optional): The name. Defaults to None: the first of the tasks'
            metrics that there is.
        rising (bool): Whether it is to be one where more is better. Defaults to False.
    """
    tests = list(tests)
    # Of a task that is not listed, the first that is not about computation.
    others = [m for m in tests[0] if not m.startswith(('macs/', 'gates/'))]
    name = wanted or next((m for m in (*main_metrics(rising), *others) if m in tests[0]), '')
    for known in tests:
        if name not in known:
            raise UsageError(f'metric {name!r} is not among {", ".join(known)}; choose by --metric')
    return name


def metric_unit(name: str) -> str:
    """What a figure of a test is counted in: '%', '10⁹', '0 to 1', or '' if unknown.

    The task packages disagree: accuracies and mIoU are in percent, mAP is a share.
    """
    if name.startswith('macs/') and name.endswith('_G'):
        return '10⁹'
    if name == RATIO:
        return '%'
    if name.startswith('gates/'):
        return '0 to 1'
    return next(filter(None, (task.unit(name) for task in TASKS.values())), '')


def metric_label(name: str) -> str:
    """A metric with its unit, as the label of an axis."""
    unit = metric_unit(name)
    return f'{name}, {unit}' if unit else name


def spread(values: Sequence[float]) -> Optional[float]:
    """Sample standard deviation; None for less than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def write_table(rows: Sequence[Row], metric: str, folder: Path, name: str = 'table') -> str:
    """Write ``table.csv`` and ``table.md``."""
    table = io.StringIO()
    writer = csv.writer(table)
    columns = (f'{figure}_{what}' for figure in (metric, RATIO) for what in ('mean', 'std'))
    writer.writerow(['setting', 'runs', *columns])
    for row in rows:
        numbers = [_mean(row.metric), spread(row.metric), _mean(row.ratio), spread(row.ratio)]
        cells = ['' if number is None else f'{number:.6g}' for number in numbers]
        writer.writerow([row.label, len(row.metric), *cells])
    lines = [f'| setting | runs | {metric} | {RATIO} |', '| --- | --- | --- | --- |']
    lines += [
        f'| {row.label} | {len(row.metric)} | {_cell(row.metric)} | {_cell(row.ratio)} |'
        for row in rows
    ]
    text = '\n'.join(lines) + '\n'
    write_files({folder / f'{name}.csv': table.getvalue(), folder / f'{name}.md': text})
    return text


def tradeoff_figure(rows: Sequence[Row], metric: str, title: str = '') -> Figure:
    """Metric against executed computation: a line of means for each series, runs as dots."""
    rows = [row for row in rows if row.metric]
    with style.style():
        figure = style.new_figure(6, 4)
        axes = figure.add_subplot()
        for number, series in enumerate(dict.fromkeys(row.series for row in rows)):
            own = [row for row in rows if row.series == series]
            means = [(100 - statistics.fmean(r.ratio), statistics.fmean(r.metric)) for r in own]
            dots = [(100 - x, y) for r in own for x, y in zip(r.ratio, r.metric, strict=True)]
            look = style.run_look(number)
            axes.plot(*zip(*sorted(means), strict=True), label=series or None, **look)
            across, up = zip(*dots, strict=True)
            axes.scatter(across, up, s=8, alpha=0.5, color=look['color'])
        axes.set_xlabel("executed MACs of the backbone, % of the dense one's")
        axes.set_ylabel(metric_label(metric))
        axes.set_title(title)
        axes.grid(True)
        if any(row.series for row in rows):
            axes.legend()
    return figure


def _mean(values: Sequence[float]) -> Optional[float]:
    return statistics.fmean(values) if values else None


def _cell(values: Sequence[float]) -> str:
    if not values:
        return '-'
    deviation = spread(values)
    around = '' if deviation is None else f' ± {deviation:.2g}'
    return f'{statistics.fmean(values):.4g}{around}'
