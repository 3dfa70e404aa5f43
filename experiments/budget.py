# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Does a budget lead where it says, and is the network there as good as one of a fixed rho?

For each demo task: networks of several seeds trained for every target with BudgetHook, and with
the same schedule for several fixed rho with L0Hook. The table has where the networks ended and,
at the very cost each one ended at, its metric less that of the fixed-rho networks (each rho the
mean of its seeds), interpolated linearly between the two whose costs lie around. What is done is
not done again, so the same command goes on where it was stopped.

    python experiments/budget.py
    python experiments/budget.py --rho-seeds 0    # several seeds of the budgets only
    python experiments/budget.py --tasks classification --targets 0.5 --seeds 0 --rho   # a part
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Optional

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from mmengine.config import Config
from runs import Run, add_run_arguments, execute_all, print_commands
from sweep_points import Point, make_runs

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis import style
from fgc_mm.analysis.tradeoff import RATIO, metric_label, task_metric
from fgc_mm.files import write_files

PROJECT = Path(__file__).parents[1]
TOOLS = PROJECT / 'tools'
BUDGET, FIXED = 'budget', 'fixed rho'


@dataclass(frozen=True)
class Task:
    """A demo task.

    Attributes:
        dense (str): Config of the network all runs start from.
        budget (str): Config of the runs.
        rho (tuple[float, ...]): Weights whose costs lie around the targets.
    """

    dense: str
    budget: str
    rho: tuple[float, ...]


TASKS = {
    'classification': Task('resnet18_digits', 'resnet18_digits_budget', (3.0, 6.0, 16.0)),
    'detection': Task(
        'faster_rcnn_r18_digits', 'faster_rcnn_r18_digits_budget', (0.05, 0.08, 0.2, 0.8)
    ),
    'segmentation': Task('pspnet_r18_digits', 'pspnet_r18_digits_budget', (0.2, 0.6, 2.0)),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=list(TASKS))
    parser.add_argument('--targets', type=float, nargs='*', default=[0.3, 0.5, 0.7])
    parser.add_argument('--rho', type=float, nargs='*', help="in place of each task's own")
    parser.add_argument('--rho-seeds', type=int, nargs='+', help='as --seeds by default')
    add_run_arguments(parser)
    return parser.parse_args()


def config_of(name: str) -> Path:
    return PROJECT / 'configs/demo' / f'{name}.py'


def dense_run(task: Task, folder: Path) -> Optional[Run]:
    """The training of the weights a task starts from, None if they are there."""
    start = PROJECT / Config.fromfile(config_of(task.budget)).load_from
    if start.is_file():
        return None
    config = folder / f'{task.dense}.py'
    return Run(config_of(task.dense), start.parent, config, TOOLS, label=task.dense)


def budget_runs(name: str, args: argparse.Namespace, folder: Path) -> list[Run]:
    """All networks of a task."""
    task = TASKS[name]
    rhos = task.rho if args.rho is None else args.rho
    targets = [Point(f'{name} target={t}', {'BudgetHook.target': t}, BUDGET) for t in args.targets]
    fixed = [Point(f'{name} rho={r}', {'L0Hook.rho': r}, FIXED) for r in rhos]
    config = config_of(task.budget)
    return [
        run
        for points, seeds in ((targets, args.seeds), (fixed, args.rho_seeds or args.seeds))
        for run in make_runs(config, points, seeds, folder, args.cfg_options, TOOLS)
    ]


@dataclass(frozen=True)
class Result:
    """A finished run: its setting, where it ended and how good it is there."""

    run: Run
    setting: float
    share: float
    metric: float


def results_of(runs: Sequence[Run], metric: Optional[str]) -> tuple[str, list[Result]]:
    """What is done of a task."""
    tests = {id(run): run.metrics() for run in runs if run.figures.is_file()}
    if not tests:
        return '', []
    name = task_metric(tests.values(), metric, rising=True)
    return name, [
        Result(
            run=run,
            setting=float(run.label.rpartition('=')[2]),
            share=1 - tests[id(run)][RATIO] / 100,
            metric=float(tests[id(run)][name]),
        )
        for run in runs
        if id(run) in tests
    ]


def curve(results: Sequence[Result], series: str) -> list[tuple[float, float]]:
    """Share and metric of each setting, means of its seeds, by share."""
    own = [result for result in results if result.run.series == series]
    points = []
    for setting in dict.fromkeys(result.setting for result in own):
        runs = [result for result in own if result.setting == setting]
        share = statistics.fmean(run.share for run in runs)
        points.append((share, statistics.fmean(run.metric for run in runs)))
    return sorted(points)


def between(points: Sequence[tuple[float, float]], share: float) -> float:
    """The metric of a curve at a share; NaN outside of it, where nobody knows."""
    for (left, low), (right, high) in pairwise(points):
        if left <= share <= right:
            return low + (share - left) / max(right - left, 1e-9) * (high - low)
    return math.nan


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard error."""
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return '-'
    mean = f'{statistics.fmean(values):.{digits}f}'
    if len(values) == 1:
        return mean
    return f'{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}'


def table(name: str, metric: str, results: Sequence[Result]) -> list[str]:
    """Targets against where the networks ended, and against fixed rho there."""
    rows = []
    digits = 3 if max(result.metric for result in results) <= 1 else 2
    fixed = curve(results, FIXED)
    for target in dict.fromkeys(r.setting for r in results if r.run.series == BUDGET):
        own = [r for r in results if r.run.series == BUDGET and r.setting == target]
        shares = [100 * result.share for result in own]
        missed = max((share - 100 * target for share in shares), key=abs)
        there = [between(fixed, result.share) for result in own]
        gained = [result.metric - value for result, value in zip(own, there, strict=True)]
        cells = [
            f'{name}, {metric}',
            f'{100 * target:g} %',
            ', '.join(f'{share:.1f}' for share in shares) + ' %',
            f'{missed:+.1f}',
            spread([result.metric for result in own], digits),
            spread(there, digits),
            spread(gained, digits),
        ]
        rows.append('| ' + ' | '.join(cells) + ' |')
    return rows


HEAD = [
    '| task | target | MACs executed, each seed | largest miss, points | metric | fixed rho at the '
    'same cost | difference |',
    '| --- ' * 7 + '|',
]


def history(folder: Path) -> list[tuple[int, float, float]]:
    """Iteration, goal and share, from all logs of a run."""
    found: dict[int, tuple[int, float, float]] = {}
    for log in sorted(folder.glob('*/vis_data/scalars.json')):
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            if 'budget/share' in entry:
                step = entry.get('iter', entry['step'])
                found[step] = (step, entry['budget/goal'], entry['budget/share'])
    return [found[step] for step in sorted(found)]


def draw_history(axes: Axes, results: Sequence[Result]) -> None:
    """The share over the training, for every target and seed."""
    targets = list(dict.fromkeys(r.setting for r in results if r.run.series == BUDGET))
    for result in results:
        values = history(result.run.folder)
        if result.run.series == FIXED or not values:
            continue
        steps, goals, shares = zip(*values, strict=True)
        color = style.RUNS[targets.index(result.setting) % len(style.RUNS)]
        axes.plot(steps, shares, color=color, lw=1)
        axes.plot(steps, goals, color='black', ls=':', lw=1)
        axes.plot(steps[-1], result.share, color=color, marker='x')
    axes.set_xlabel('iteration')
    axes.set_ylabel('executed share: training (line),\ngoal (dots), test (x)')
    axes.grid(True)


def draw_tradeoff(axes: Axes, results: Sequence[Result], metric: str) -> None:
    """Metric against cost of both ways."""
    for number, series in enumerate((BUDGET, FIXED)):
        own = [result for result in results if result.run.series == series]
        if own:
            look = style.run_look(number)
            axes.plot(*zip(*curve(results, series), strict=True), label=series, **look)
            axes.scatter(
                [r.share for r in own], [r.metric for r in own], s=8, alpha=0.5, color=look['color']
            )
    axes.set_xlabel("executed share of the backbone's MACs")
    axes.set_ylabel(metric_label(metric))
    axes.grid(True)
    axes.legend()


def draw(done: dict[str, tuple[str, list[Result]]]) -> Figure:
    """A column for each task: the trainings above, where they led below."""
    with style.figure(4.5 * len(done), 7) as figure:
        axes = figure.subplots(2, len(done), squeeze=False)
        for column, (name, (metric, results)) in enumerate(done.items()):
            if results:
                draw_history(axes[0][column], results)
                draw_tradeoff(axes[1][column], results, metric)
            axes[0][column].set_title(name)
    return figure


def main() -> None:
    args = parse_args()
    os.chdir(PROJECT)  # where configs look for their data
    work_dir = PROJECT / (args.work_dir or 'work_dirs/budget')
    runs = {name: budget_runs(name, args, work_dir / name) for name in args.tasks}
    # Seed by seed, so that a stopped series has something to say about every point.
    order = sorted((run for own in runs.values() for run in own), key=lambda run: run.seed)
    start = [dense_run(TASKS[name], work_dir) for name in args.tasks]
    order = [run for run in start if run is not None] + order
    if args.dry_run:
        print_commands(order)
        return
    failed = 0 if args.report else execute_all(order)
    done = {name: results_of(own, args.metric) for name, own in runs.items()}
    lines = list(HEAD)
    for name, (metric, results) in done.items():
        lines += table(name, metric, results) if results else []
    text = '\n'.join(lines) + '\n'
    write_files({work_dir / 'budget.md': text})
    style.save(draw(done), work_dir / 'budget')
    print(f'\n{text}\nwritten: budget.md, budget.png and budget.svg in {work_dir}')
    if failed:
        raise SystemExit(f'{failed} of {len(order)} runs failed')


if __name__ == '__main__':
    main()
