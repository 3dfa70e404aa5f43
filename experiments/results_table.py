# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What experiments/results.py measures of a trained network, and its tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from results_kept import ALIGNMENT
from results_rows import WAYS, Task
from runs import Run

from fgc_mm.analysis.alignment import PANELS, align
from fgc_mm.analysis.gather import gather
from fgc_mm.analysis.tradeoff import RATIO, Row, metric_unit
from fgc_mm.errors import CheckpointError, UsageError
from fgc_mm.evaluation.summary import dump
from fgc_mm.runtime.config.files import read_config


def look(run: Run, task: Task) -> None:
    """Measure how gates follow features on the test pictures, unless that is done.

    Writes ``alignment.json`` into the run's folder: for each gate of the task's
    layers the figures of :func:`~fgc_mm.analysis.alignment.align`; empty for a
    network without gates.
    """
    path = run.folder / ALIGNMENT
    checkpoint = run.checkpoint()
    if path.is_file() or checkpoint is None:
        return
    cfg = read_config(str(run.folder / run.config.name))  # as it was trained
    cfg.launcher = 'none'
    try:
        table = gather(cfg, str(checkpoint))
    except (CheckpointError, UsageError):
        dump(path, {})
        return
    layers = table.choose(task.layers)
    dump(path, {name: align(table, name, k=task.neighbors) for name in layers})


def figures(outcome: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """All that is known of a finished run: plain numbers, None where there is nothing."""
    metrics, gates = outcome['metrics'], outcome['alignment']
    known: dict[str, Any] = dict(
        label=outcome['label'],
        seed=outcome['seed'],
        metric=float(metrics[task.metric]),
        ratio=float(metrics[RATIO]),
        openness=metrics.get('gates/openness'),
        dynamic=100 * metrics['gates/dynamic'] if gates and 'gates/dynamic' in metrics else None,
        layers=gates,
    )
    for name in PANELS:
        known[name] = statistics.fmean(g[name] for g in gates.values()) if gates else None
    kinds = {row['kind']: row for row in (outcome['speed'] or {}).get('rows', [])}
    known['time'] = kinds['sparse']['time_ratio'] if kinds else None
    known['static_time'] = kinds['static']['time_ratio'] if kinds else None
    known['slim_time'] = kinds['slim']['time_ratio'] if 'slim' in kinds else None
    return known


def mean_and_spread(values: Sequence[Optional[float]], digits: int) -> str:
    """Mean ± sample standard deviation of what is known."""
    numbers = [float(v) for v in values if v is not None and not math.isnan(float(v))]
    if not numbers:
        return ''
    mean = f'{statistics.fmean(numbers):.{digits}f}'
    return mean if len(numbers) < 2 else f'{mean} ± {statistics.stdev(numbers):.{digits}f}'


def differences(own: Sequence[dict], others: Sequence[dict]) -> list[float]:
    """The metric less that of another row, for every seed that both have."""
    theirs = {run['seed']: run['metric'] for run in others}
    return [run['metric'] - theirs[run['seed']] for run in own if run['seed'] in theirs]


def table(
    done: Sequence[dict],
    task: Task,
    versus: Optional[Mapping[str, str]] = None,
    measured: Optional[Sequence[dict]] = None,
) -> str:
    """A table of a task in markdown: a line for each row that has finished runs.

    Args:
        done (Sequence[dict]): The :func:`figures` of its runs.
        task (Task): The task.
        versus (Mapping[str, str], optional): Row -> the row that is the same
            without FGC. Defaults to None: those of :data:`WAYS`.
        measured (Sequence[dict], optional): Where that row's runs are. Defaults to
            None: among ``done``.
    """
    k, digits = task.neighbors, 3 if metric_unit(task.metric) == '0 to 1' else 2
    if versus is None:
        versus = {way.label: way.versus for way in WAYS.values()}
    head = [
        'row',
        'seeds',
        task.metric,
        'with FGC less without, same seeds',
        'MACs saved, %',
        'dynamic channels, %',
        f'overlap@{k}',
        'NMI features, gates',
        'NMI gates, classes',
    ]
    timed = any(run['time'] is not None for run in done)
    head += ['time, sparse / dense', 'slimmed and sparse / dense'] if timed else []
    lines = ['| ' + ' | '.join(head) + ' |', '| --- ' * len(head) + '|']
    for label in dict.fromkeys(run['label'] for run in done):
        own = [run for run in done if run['label'] == label]
        others = [run for run in measured or done if run['label'] == versus.get(label, '')]
        gained = differences(own, others)

        def cell(name: str, places: int, own: list[dict] = own) -> str:
            return mean_and_spread([run[name] for run in own], places)

        cells = [
            label,
            ', '.join(str(run['seed']) for run in own),
            cell('metric', digits),
            mean_and_spread(gained, digits),
            cell('ratio', 1),
            cell('dynamic', 1),
            cell('overlap', 3),
            cell('nmi_feature_gate', 3),
            cell('nmi_gate_label', 3),
        ]
        cells += [cell('time', 2), cell('slim_time', 2)] if timed else []
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'


def tradeoff_rows(done: Sequence[tuple[Run, Mapping[str, Any]]], metric: str) -> list[Row]:
    """Runs and outcomes of curves, for :func:`~fgc_mm.analysis.tradeoff.tradeoff_figure`."""
    rows: dict[str, Row] = {}
    for run, outcome in done:
        if run.series:
            row = rows.setdefault(run.label, Row(run.label, run.series, [], []))
            row.metric.append(float(outcome['metrics'][metric]))
            row.ratio.append(float(outcome['metrics'][RATIO]))
    return list(rows.values())
