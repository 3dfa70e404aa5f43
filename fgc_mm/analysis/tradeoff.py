# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Metrics against executed MACs: figures of tests, tables and the plot of a trade-off."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
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

    It is the one that is wanted, else the first of the tasks' metrics that there is; ``rising``
    leaves out those where less is better.
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


def read_figures(path: Path) -> list[dict[str, Any]]:
    """The metrics in a file that ``tools/test.py --out`` wrote."""
    try:
        content = json.loads(Path(path).read_text())
        tests = [point['metrics'] for point in content.get('points', [content])]
        for metrics in tests:
            float(metrics[RATIO])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f'{path} holds no figures of tools/test.py --out: {error!r}') from None
    if not tests:
        raise UsageError(f'{path} holds no figures of tools/test.py --out: it has no points')
    return tests


def point_label(point: Mapping[str, Any]) -> str:
    """The setting of one test of several, such as ``budget=0.4, threshold=0.964``."""
    if 'budget' in point:
        return f'budget={point["budget"]:g}, threshold={point["threshold"]:.4g}'
    return f'threshold={point["threshold"]:g}' if 'threshold' in point else ''


def spread(values: Sequence[float]) -> Optional[float]:
    """Sample standard deviation; None for less than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def write_table(rows: Sequence[Row], metric: str, folder: Path, name: str = 'table') -> str:
    """Write ``table.csv`` and ``table.md``."""
    cells = []
    lines = [f'| setting | runs | {metric} | {RATIO} |', '| --- | --- | --- | --- |']
    for row in rows:
        line: dict[str, Any] = dict(setting=row.label, runs=len(row.metric))
        texts = [row.label, str(len(row.metric))]
        for figure, values in ((metric, row.metric), (RATIO, row.ratio)):
            mean, around = statistics.fmean(values) if values else None, spread(values)
            line |= {f'{figure}_mean': mean, f'{figure}_std': around}
            text = '-' if mean is None else f'{mean:.4g}'
            texts.append(text if around is None else f'{text} ± {around:.2g}')
        cells.append(line)
        lines.append(f'| {" | ".join(texts)} |')
    text = '\n'.join(lines) + '\n'
    style.write_csv(cells, folder / f'{name}.csv')
    write_files({folder / f'{name}.md': text})
    return text


def tradeoff_figure(rows: Sequence[Row], metric: str, title: str = '') -> Figure:
    """Metric against executed computation: a line of means for each series, runs as dots."""
    rows = [row for row in rows if row.metric]
    with style.figure(6, 4) as figure:
        axes = figure.add_subplot()
        for number, series in enumerate(dict.fromkeys(row.series for row in rows)):
            own = [row for row in rows if row.series == series]
            means = [(100 - statistics.fmean(r.ratio), statistics.fmean(r.metric)) for r in own]
            dots = [(100 - x, y) for r in own for x, y in zip(r.ratio, r.metric, strict=True)]
            look = style.run_look(number)
            axes.plot(*zip(*sorted(means), strict=True), label=series or None, **look)
            left, up = zip(*dots, strict=True)
            axes.scatter(left, up, s=8, alpha=0.5, color=look['color'])
        across = "executed MACs of the backbone, % of the dense one's"
        axes.set(xlabel=across, ylabel=metric_label(metric), title=title)
        axes.grid(True)
        if any(row.series for row in rows):
            axes.legend()
    return figure
