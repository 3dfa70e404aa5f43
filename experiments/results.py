# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The measured tables of docs/results.md: trainings on real pictures at one cost, row by row.

Trains and tests every row of every task with several seeds, as experiments/sweep.py does, looks
at the gates on the test pictures, and writes results.md, results.json and the trade-off of accuracy
and MACs. What is done is not done again, so the same command goes on where it was stopped.
What came out of each run is kept as one small file in experiments/measured, for all machines:
tables are made from these alone, and a run counts as done while its config is the same.

    python experiments/results.py --jobs 2                          # everything but the times
    python experiments/results.py --tasks resnet20 --parts rows --rows gated fgc --seeds 1
    python experiments/results.py --tasks resnet20 --parts search   # weights of the coupling
    python experiments/results.py --speed                           # times, on an idle machine
    python experiments/results.py --report                          # tables of what is done

--limit 1 makes one run that was not done yet, --only TEXT makes those whose label contains
it: for machines that are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from results_kept import SPEED, Kept
from results_rows import (
    PROJECT,
    TASKS,
    TOOLS,
    WAYS,
    Task,
    Trial,
    biases_of,
    rows_of,
    runs_of,
    search_of,
    tradeoff_of,
    tried_of,
)
from results_table import figures, look, table, tradeoff_rows
from runs import Run, add_run_arguments, print_commands

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis import style
from fgc_mm.analysis.tradeoff import tradeoff_figure
from fgc_mm.errors import UsageError
from fgc_mm.files import write_files
from fgc_mm.runtime.config.files import read_config

TITLES = dict(
    search='weights of the coupling',
    bias='first bias of the gates',
    rows='rows',
    tradeoff='other costs',
    tried='what else was tried',
)
PARTS = tuple(TITLES)
MEASURED = 'measured'
TIMED = ('static', 'sparse', 'slim')
_preparing = threading.Lock()
Plan = dict[str, dict[str, list[Run]]]
"""Task -> part -> its runs."""


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
    parser.add_argument(
        '--jobs', type=positive, default=1, help='trainings at a time, with a share of the cores'
    )
    parser.add_argument('--speed', action='store_true', help='measure times of what is trained')
    parser.add_argument(
        '--keep',
        metavar='DIR',
        help='folder of the outcomes; experiments/measured by default, and with --cfg-options, '
        'whose runs are others, a folder in the work dir',
    )
    add_run_arguments(parser, seeds=(1, 2, 3))
    return parser.parse_args()


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} must be a whole number, 1 or more')
    return int(text)


def planned(name: str, args: argparse.Namespace, folder: Path) -> dict[str, list[Run]]:
    """Part -> its runs, of one task."""
    plan = {}
    for part in args.parts:
        trials = trials_of(TASKS[name], part, args.rows)
        chosen = [trial for trial in trials if args.only in trial.point.label]
        seeds = args.search_seeds if part in ('search', 'bias') else args.seeds
        plan[part] = runs_of(chosen, seeds, folder, args.cfg_options, args.flags)
    return plan


def trials_of(task: Task, part: str, rows: Sequence[str] = tuple(WAYS)) -> list[Trial]:
    """What is trained for a part of a task's tables."""
    makers = dict(search=search_of, bias=biases_of, tradeoff=tradeoff_of, tried=tried_of)
    return rows_of(task, rows) if part == 'rows' else makers[part](task)


def make_start(task: Task, folder: Path) -> bool:
    """Make the weights that all rows of a task start from; whether they are there."""
    start = PROJECT / read_config(str(task.path('baseline'))).load_from
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


def execute(plan: Plan, kept: Kept, limit: int | None, jobs: int) -> int:
    """Make what is missing, some at a time, and keep what is done; how many failed."""
    failed = made = 0
    for name, parts in plan.items():
        missing = [r for runs in parts.values() for r in runs if kept.read(name, r) is None]
        new = [run for run in missing if not run.figures.is_file()]
        left_out = new[max(limit - made, 0) :] if limit is not None else []
        made += len(new) - len(left_out)
        if len(new) > len(left_out) and not make_start(TASKS[name], kept.work_dir):
            raise SystemExit(f'{name}: what its rows start from could not be made')
        with ThreadPoolExecutor(jobs) as pool:
            runs = [run for run in missing if run not in left_out]
            waiting = {pool.submit(finish, name, run, kept): run for run in runs}
            try:
                for number, future in enumerate(as_completed(waiting), 1):
                    print(f'{name}: {number} of {len(runs)} finished', flush=True)
                    if future.result():
                        look(waiting[future], TASKS[name])
                        kept.keep(name, waiting[future])
                    else:
                        failed += 1
            except BaseException:  # such as Ctrl-C: no further ones are begun
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return failed


def finish(name: str, run: Run, kept: Kept) -> bool:
    """Train and test a run unless that is done; whether its figures are those of its config."""
    with _preparing:  # seeds share a config, which one of them writes
        try:
            run.prepare()
        except ValueError as error:
            print(error)
            return False
        if not kept.begin(run):
            return False
    if not run.figures.is_file():
        print(f'{name}: {run.label}, seed {run.seed}', flush=True)
    return run.execute()


def share_threads(jobs: int) -> None:
    """Give each of several trainings its share of the processors, and this program no more."""
    threads = max((os.cpu_count() or 1) // jobs, 1)
    os.environ.setdefault('OMP_NUM_THREADS', str(threads))
    torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))


def measure_speed(name: str, runs: Sequence[Run], kept: Kept) -> None:
    """Times of the first seed of every row with gates, dense and sparse in the same run."""
    for label in dict.fromkeys(run.label for run in runs):
        own = [run for run, _ in outcomes(name, runs, kept) if run.label == label]
        known = [kept.read(name, run) or {} for run in own]
        if any(outcome['speed'] or not outcome['alignment'] for outcome in known):
            continue  # measured, or a dense network
        run = next((run for run in own if run.checkpoint() is not None), None)
        if run is None:
            continue  # trained elsewhere, or not yet
        script = str(PROJECT / 'benchmarks/speed.py')
        trained = [str(run.config), str(run.checkpoint())]
        out = str(run.folder / SPEED)
        print(f'time of {run.label}, seed {run.seed}', flush=True)
        command = [sys.executable, script, '--kinds', *TIMED, '--trained', *trained, '--out', out]
        subprocess.run(command, check=True)
        kept.keep_speed(name, run)


def outcomes(name: str, runs: Sequence[Run], kept: Kept) -> list[tuple[Run, dict]]:
    """Those runs of a task that are done, each with what is kept of it."""
    known = ((run, kept.read(name, run)) for run in runs)
    return [(run, outcome) for run, outcome in known if outcome is not None]


def write(plan: Plan, folder: Path, kept: Kept) -> None:
    """Write tables, figures and the plot of what is kept, all seeds."""
    everything = {}
    for name, parts in plan.items():
        task = TASKS[name]
        done = {part: outcomes(name, runs, kept) for part, runs in parts.items()}
        for part, own in done.items():
            if own:
                everything[f'{name}/{part}'] = [figures(outcome, task) for _, outcome in own]
        starts = {outcome['start'] for own in done.values() for _, outcome in own} - {None}
        if len(starts) > 1:
            print(f'{name}: runs have started from different weights, see start in {kept.folder}')
        threads = {outcome['machine']['threads'] for own in done.values() for _, outcome in own}
        if len(threads) > 1:
            counts = ' and '.join(map(str, sorted(threads)))
            print(f'{name}: runs had {counts} threads, which round differently: see --jobs')
        curves = [*done.get('rows', []), *done.get('tradeoff', [])]
        metric = task.metric.replace('error/', 'accuracy/')
        rows = tradeoff_rows(curves, metric)
        if len(rows) > 2:
            style.save(tradeoff_figure(rows, metric, name), folder / f'tradeoff_{name}')
    figures_of_all = json.dumps(everything, indent=1) + '\n'
    write_files(
        {folder / 'results.md': tables(plan, plan, kept), folder / 'results.json': figures_of_all}
    )


def tables(shown: Plan, plan: Plan, kept: Kept) -> str:
    """Tables of some runs, compared with any that are kept."""
    text = ''
    for name, parts in shown.items():
        task = TASKS[name]
        every = [run for runs in plan[name].values() for run in runs]
        measured = [figures(outcome, task) for _, outcome in outcomes(name, every, kept)]
        for part, runs in parts.items():
            known = [figures(outcome, task) for _, outcome in outcomes(name, runs, kept)]
            if known:
                versus = {trial.point.label: trial.versus for trial in trials_of(task, part)}
                text += f'## {name}: {TITLES[part]}\n\n{table(known, task, versus, measured)}\n'
    return text


def say_commands(plan: Plan, kept: Kept) -> None:
    """What :func:`execute` would do."""
    for name, parts in plan.items():
        for run in (run for runs in parts.values() for run in runs):
            if kept.read(name, run) is not None:
                print(f'# {run.label}, seed {run.seed}: done, {kept.path(name, run)}')
            else:
                print_commands([run])


def make(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    folder = PROJECT / (args.work_dir or 'work_dirs/results')
    own = folder / MEASURED if args.cfg_options else PROJECT / 'experiments' / MEASURED
    kept = Kept(PROJECT / args.keep if args.keep else own, folder, TASKS)
    if args.report:
        args.seeds = sorted({s for name in args.tasks for s in kept.seeds(name)})
        args.search_seeds = args.seeds
    plan = {name: planned(name, args, folder / name) for name in args.tasks}
    if args.dry_run:
        say_commands(plan, kept)
        return
    failed = 0
    if args.speed:
        for name, parts in plan.items():
            measure_speed(name, parts.get('rows', []), kept)
    elif not args.report:
        if args.jobs > 1:
            share_threads(args.jobs)
        failed = execute(plan, kept, args.limit, args.jobs)
    whole = argparse.Namespace(**vars(args))
    whole.parts, whole.rows, whole.only = PARTS, list(WAYS), ''
    everything = {}
    for name in TASKS:
        whole.seeds = whole.search_seeds = sorted(kept.seeds(name))
        everything[name] = planned(name, whole, folder / name)
    write(everything, folder, kept)
    print(f'\n{tables(plan, everything, kept)}')
    print(f'of all that is kept: results.md, results.json and plots in {folder}')
    if failed:
        raise SystemExit(f'{failed} runs failed')


def main() -> None:
    args = parse_args()
    os.chdir(PROJECT)  # where configs look for their data
    try:
        make(args)
    except UsageError as error:
        raise SystemExit(f'error: {error}') from None


if __name__ == '__main__':
    main()
