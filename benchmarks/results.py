# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The measured tables of docs/results.md: trainings on real pictures at one cost, row by row.

Trains and tests every row of every task with several seeds, as tools/sweep.py does, looks at the
gates on the test pictures, and writes results.md, results.json and the trade-off of accuracy
and MACs. What is done is not done again, so the same command goes on where it was stopped.

    python benchmarks/results.py                                  # everything but the times
    python benchmarks/results.py --tasks resnet20 --parts rows --rows gated fgc --seeds 1
    python benchmarks/results.py --tasks resnet20 --parts search   # weights of the coupling
    python benchmarks/results.py --speed                           # times, on an idle machine
    python benchmarks/results.py --report                          # tables of what is done

--limit 1 stops after one run that was not done yet, --only TEXT makes those whose label contains
it: for machines that are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from results_rows import PROJECT, TASKS, TOOLS, WAYS, Task, rows_of, runs_of, search_of, tradeoff_of
from results_table import SPEED, figures, look, table, tradeoff_rows

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis import Run, add_run_arguments, print_commands, style
from fgc_mm.analysis.results import ACCURACIES, tradeoff_figure
from fgc_mm.engine import launch

PARTS = ('search', 'rows', 'tradeoff')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=list(TASKS))
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=list(PARTS))
    parser.add_argument('--rows', nargs='+', choices=WAYS, default=list(WAYS))
    # Weights are chosen with another seed than those that are shown.
    parser.add_argument('--search-seeds', type=int, nargs='+', default=[0])
    parser.add_argument('--only', default='', help='runs whose label contains it')
    parser.add_argument('--limit', type=int, help='make that many runs at most')
    parser.add_argument('--speed', action='store_true', help='measure times of what is trained')
    add_run_arguments(parser, seeds=(1, 2, 3))
    return parser.parse_args()


def planned(name: str, args: argparse.Namespace, folder: Path) -> dict[str, list[Run]]:
    """Part -> its runs, of one task."""
    task = TASKS[name]
    points = dict(search=search_of(task), rows=rows_of(task, args.rows), tradeoff=tradeoff_of(task))
    seeds = dict(search=args.search_seeds, rows=args.seeds, tradeoff=args.seeds)
    chosen = {part: [p for p in points[part] if args.only in p[1].label] for part in args.parts}
    return {
        part: runs_of(own, seeds[part], folder, args.cfg_options, args.flags)
        for part, own in chosen.items()
    }


def make_start(task: Task, folder: Path) -> bool:
    """Make the weights that all rows of a task start from; whether they are there."""
    start = PROJECT / launch.read_config(str(task.path('baseline'))).load_from
    if start.is_file():
        return True
    if task.start.endswith('.th'):
        source = PROJECT / 'data/weights' / task.start
        command = [sys.executable, str(TOOLS / 'convert_weights.py'), str(source), str(start)]
        return subprocess.run(command).returncode == 0
    base = PROJECT / 'configs/short' / f'{task.start}.py'
    run = Run(base, start.parent, folder / f'{task.start}.py', TOOLS, label=task.start)
    print(f'first {run.label}', flush=True)
    return run.execute()


def execute(plan: dict[str, dict[str, list[Run]]], folder: Path, limit: int | None) -> int:
    """Make what is missing; how many failed."""
    failed = made = 0
    for name, parts in plan.items():
        for run in (run for runs in parts.values() for run in runs):
            if not run.figures.is_file():
                if limit is not None and made >= limit:
                    return failed
                if not make_start(TASKS[name], folder):
                    raise SystemExit(f'{name}: what its rows start from could not be made')
                print(f'{name}: {run.label}, seed {run.seed}', flush=True)
                made += 1
            if run.execute():
                look(run, TASKS[name])
            else:
                failed += 1
    return failed


def measure_speed(runs: Sequence[Run]) -> None:
    """Times of the first seed of every row with gates, dense and sparse in the same run."""
    for label in dict.fromkeys(run.label for run in runs):
        own = [run for run in runs if run.label == label and run.figures.is_file()]
        if not own or (own[0].folder / SPEED).is_file():
            continue
        run = own[0]
        if not json.loads(run.figures.read_text())['layers']:  # a dense network
            continue
        script = str(Path(__file__).with_name('speed.py'))
        trained = [str(run.config), str(run.checkpoint())]
        out = str(run.folder / SPEED)
        print(f'time of {run.label}, seed {run.seed}', flush=True)
        subprocess.run([sys.executable, script, '--trained', *trained, '--out', out], check=True)


def write(plan: dict[str, dict[str, list[Run]]], folder: Path) -> str:
    """Write tables, figures and the plot of what is done; the tables."""
    titles = dict(search='weights of the coupling', rows='rows', tradeoff='other costs')
    text, everything = '', {}
    for name, parts in plan.items():
        task = TASKS[name]
        for part, runs in parts.items():
            done = [figures(run, task) for run in runs if run.figures.is_file()]
            if done:
                reference = 'search, without FGC' if part == 'search' else WAYS['gated'].label
                text += f'## {name}: {titles[part]}\n\n{table(done, task, reference)}\n'
                everything[f'{name}/{part}'] = done
        curves = [run for part in ('rows', 'tradeoff') for run in parts.get(part, [])]
        metric = ACCURACIES[0] if task.metric.startswith('error') else task.metric
        rows = tradeoff_rows(curves, metric)
        if len(rows) > 2:
            style.save(tradeoff_figure(rows, metric, name), folder / f'tradeoff_{name}')
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'results.md').write_text(text, encoding='utf-8')
    (folder / 'results.json').write_text(json.dumps(everything, indent=1) + '\n')
    return text


def main() -> None:
    args = parse_args()
    os.chdir(PROJECT)  # where configs look for their data
    folder = PROJECT / (args.work_dir or 'work_dirs/results')
    plan = {name: planned(name, args, folder / name) for name in args.tasks}
    if args.dry_run:
        for parts in plan.values():
            for runs in parts.values():
                print_commands(runs)
        return
    failed = 0
    if args.speed:
        for parts in plan.values():
            measure_speed(parts.get('rows', []))
    elif not args.report:
        failed = execute(plan, folder, args.limit)
    print(f'\n{write(plan, folder)}\nwritten: results.md, results.json and plots in {folder}')
    if failed:
        raise SystemExit(f'{failed} runs failed')


if __name__ == '__main__':
    main()
