# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Does a budget lead where it says, and is the network there as good as one of a fixed rho?

For each demo task: networks trained with BudgetHook for every target and seed, and
networks trained with L0Hook for several rho. The table has the miss of every target and,
at the cost each budgeted network ended at, its metric against that of the fixed-rho
curve, read off between its two neighbours. The curves show the share over the
training. What is trained or tested is not done again, so a stopped run goes on.

    python benchmarks/budget.py
    python benchmarks/budget.py --tasks classification --targets 0.5 --seeds 0 --rho   # a part
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from mmengine.config import Config

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis import Point, Run, average, point_of, task_metric, vary, write

PROJECT = Path(__file__).parents[1]
TASKS = {
    'classification': 'configs/demo/resnet18_digits_gated.py',
    'detection': 'configs/demo/faster_rcnn_r18_digits_gated.py',
    'segmentation': 'configs/demo/pspnet_r18_digits_gated.py',
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=list(TASKS))
    parser.add_argument('--targets', type=float, nargs='+', default=[0.3, 0.5, 0.7])
    parser.add_argument('--rho', type=float, nargs='*', default=[0.5, 1.0, 2.0, 4.0, 8.0])
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--work-dir', default='work_dirs/budget')
    parser.add_argument('--cfg-options', nargs='+', default=[], help='for a shorter trial')
    return parser.parse_args()


def runs_of(task: str, args: argparse.Namespace) -> tuple[list[Point], str]:
    """All networks of a task, as points of two curves."""
    base = Config.fromfile(PROJECT / TASKS[task])
    folder, points, metric = Path(args.work_dir) / task, [], ''
    for kind, settings in (('target', args.targets), ('rho', args.rho)):
        for setting in settings:
            for seed in args.seeds:
                cfg = vary(base, seed=seed, **{kind: setting})
                place = folder / f'{kind}{setting:g}_seed{seed}'
                figures = Run(cfg, place, PROJECT / 'tools').figures(args.cfg_options)
                metric = task_metric(figures)
                points.append(point_of(figures, kind, setting, metric, seed=seed))
                print(f'{task} {kind} {setting:g} seed {seed}: {points[-1]}', flush=True)
    return points, metric


def between(curve: list[tuple[float, float]], share: float) -> float:
    """The metric of a curve at a share; NaN outside of it, where nobody knows."""
    curve = sorted(curve)
    for (left, low), (right, high) in pairwise(curve):
        if left <= share <= right:
            return low if right == left else low + (high - low) * (share - left) / (right - left)
    return float('nan')


def table(points: list[Point], metric: str) -> str:
    """Targets against where the networks ended, and against the fixed-rho curve."""
    fixed = [(mean.share, mean.metric) for mean, _ in average(points) if mean.curve == 'rho']
    rows = [
        f'| target | seed | MACs executed | miss, points | {metric} | fixed rho there |',
        '| --- ' * 6 + '|',
    ]
    for point in points:
        if point.curve == 'target':
            miss = 100 * (point.share - point.setting)
            rows.append(
                f'| {point.setting:g} | {point.notes["seed"]} | {100 * point.share:.2f} % | '
                f'{miss:+.2f} | {point.metric:.4g} | {between(fixed, point.share):.4g} |'
            )
    return '\n'.join(rows) + '\n'


def history(folder: Path) -> dict[str, list[float]]:
    """Goal and share over the iterations, from all logs of a run."""
    found: dict[int, dict[str, Any]] = {}
    for log in sorted(folder.glob('*/vis_data/scalars.json')):
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            if 'budget/share' in entry:
                found[entry.get('iter', entry['step'])] = entry
    steps = sorted(found)
    return dict(
        step=[float(step) for step in steps],
        goal=[found[step]['budget/goal'] for step in steps],
        share=[found[step]['budget/share'] for step in steps],
    )


def draw_history(task: str, args: argparse.Namespace, path: Path) -> None:
    """The share over the training, for every target and seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, target in enumerate(args.targets):
        for seed in args.seeds:
            values = history(Path(args.work_dir) / task / f'target{target:g}_seed{seed}')
            label = f'target {target:g}' if seed == args.seeds[0] else None
            axes.plot(values['step'], values['share'], color=f'C{number}', lw=1, label=label)
        axes.plot(values['step'], values['goal'], color=f'C{number}', ls=':', lw=1)
    axes.set_xlabel('iteration')
    axes.set_ylabel("executed share of the backbone's MACs")
    axes.set_title(f'{task}: share (lines) and goal (dots)')
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    args = parse_args()
    args.work_dir = str(PROJECT / args.work_dir)
    for task in args.tasks:
        points, metric = runs_of(task, args)
        folder = Path(args.work_dir) / task
        write(points, 'setting', metric, folder, 'tradeoff', task)
        text = table(points, metric)
        (folder / 'budget.md').write_text(text)
        draw_history(task, args, folder / 'budget.png')
        print(f'\n{task}\n\n{text}', flush=True)


if __name__ == '__main__':
    main()
