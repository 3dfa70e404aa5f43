# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The rows and the figure of a sweep."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Optional

from matplotlib.figure import Figure
from runs import Run

from fgc_mm.analysis import style
from fgc_mm.analysis.tradeoff import (
    RATIO,
    Row,
    metric_label,
    spread,
    task_metric,
)
from fgc_mm.errors import UsageError


def collect(
    runs: Sequence[Run], metric: Optional[str] = None, rising: bool = False
) -> tuple[str, list[Row]]:
    """Read the figures of the runs that are done.

    Args:
        runs (Sequence[Run]): All runs.
        metric (str, optional): Name of the metric as in ``figures.json``.
            Defaults to None: the task's.
        rising (bool): See :func:`task_metric`. Defaults to False.

    Returns:
        tuple: Name of the metric, and a row for each point.

    Raises:
        ValueError: If no run is done or one lacks the metric.
    """
    figures = {id(run): run.metrics() for run in runs if run.figures.is_file()}
    if not figures:
        raise UsageError('no run has its figures.json yet')
    name = task_metric(figures.values(), metric, rising)
    rows: dict[str, Row] = {}
    for run in runs:
        row = rows.setdefault(run.label, Row(run.label, run.series, [], []))
        if id(run) in figures:
            row.metric.append(figures[id(run)][name])
            row.ratio.append(figures[id(run)][RATIO])
    return name, list(rows.values())


def sweep_figure(rows: Sequence[Row], metric: str) -> Figure:
    """Metric and pruning ratio over the settings: means, spread as bars, runs as dots.

    Args:
        rows (Sequence[Row]): The rows; those without runs leave a gap.
        metric (str): Name of the metric.
    """
    # One place on the axis for the same setting of several series.
    names = [row.label.removesuffix(f', {row.series}') for row in rows]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    with style.figure(max(5.0, 0.7 * len(rows) + 2), 6) as figure:
        axes = figure.subplots(2, sharex=True)
        parts = (
            (axes[0], 'metric', metric_label(metric)),
            (axes[1], 'ratio', 'backbone MACs saved, %'),
        )
        for axis, attribute, title in parts:
            for number, series in enumerate(dict.fromkeys(row.series for row in rows)):
                own = [
                    (places[name], getattr(row, attribute))
                    for name, row in zip(names, rows, strict=True)
                    if row.series == series and row.metric
                ]
                if not own:
                    continue
                look = style.run_look(number)
                axis.errorbar(
                    [place for place, _ in own],
                    [statistics.fmean(values) for _, values in own],
                    yerr=[spread(values) or 0.0 for _, values in own],
                    capsize=3,
                    label=series or None,
                    **look,
                )
                dots = [(place, value) for place, values in own for value in values]
                axis.scatter(*zip(*dots, strict=True), s=8, alpha=0.5, color=look['color'])
            axis.set_ylabel(title)
            axis.grid(True)
        if any(row.series for row in rows):
            axes[0].legend()
        axes[1].set_xticks(list(places.values()), list(places), rotation=45, ha='right')
        axes[1].set_xlabel('setting')
    return figure
