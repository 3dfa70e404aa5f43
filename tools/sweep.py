# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Train and test a config with other settings of its hooks: the paper's ablations or your own.

Every run has a folder below the work dir and is skipped once it has its figures.json, so the
same command goes on where it was stopped. At the end: table.csv, table.md and sweep.png.
"""

import argparse
import shlex
from pathlib import Path

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis.sweep import ABLATIONS, Sweep, grid
from fgc_mm.analysis.sweep_results import collect, sweep_figure, write_table
from fgc_mm.engine import launch


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'config', nargs='?', default='configs/resnet20_fgc_cifar10.py', help='base config'
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument('--ablation', choices=list(ABLATIONS), help="the paper's values")
    what.add_argument(
        '--set',
        nargs='+',
        action='append',
        metavar=('KEY', 'VALUE'),
        help='field of a hook and its values, as FGCHook.k 5 20; given twice: all combinations',
    )
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], help='0 1 2 by default')
    parser.add_argument('--work-dir', help='work_dirs/sweep_<what>_<config> by default')
    parser.add_argument('--metric', help="as in figures.json; the task's by default")
    parser.add_argument('--dry-run', action='store_true', help='print the commands only')
    parser.add_argument('--report', action='store_true', help='table and plot of what is done')
    parser.add_argument(
        '--cfg-options', nargs='+', default=[], help='settings of every run, as key=value'
    )
    parser.set_defaults(launcher='none', local_rank=0)
    return parser.parse_args()


def make_sweep(args: argparse.Namespace) -> tuple[Sweep, Path]:
    # Only to have a wrong path or option said in one message.
    check = argparse.Namespace(**{**vars(args), 'cfg_options': None, 'work_dir': None})
    cfg = launch.load_config(check)
    name = args.ablation or '_'.join(key for key, *_ in args.set)
    work_dir = Path(args.work_dir or f'work_dirs/sweep_{name}_{Path(args.config).stem}')
    hooks = cfg.get('custom_hooks') or []
    points = ABLATIONS[args.ablation] if args.ablation else grid(args.set, hooks)
    tools = Path(__file__).parent
    return Sweep(args.config, points, args.seeds, work_dir, args.cfg_options, tools), work_dir


def main() -> None:
    args = parse_args()
    try:
        sweep, work_dir = make_sweep(args)
        if args.dry_run:
            for run in sweep.runs:
                done = run.figures.is_file()
                print(f'# {run.point.label}, seed {run.seed}' + (': done' if done else ''))
                if not done:
                    print(shlex.join(sweep.train_command(run)))
                    print(shlex.join(sweep.test_command(run)))
            return
        failed = []
        for number, run in enumerate([] if args.report else sweep.runs, 1):
            print(f'[{number}/{len(sweep.runs)}] {run.point.label}, seed {run.seed}', flush=True)
            if not sweep.execute(run):
                failed.append(run)
        metric, rows = collect(sweep.runs, args.metric)
    except ValueError as error:
        raise launch.UsageError(str(error)) from error
    print(write_table(rows, metric, work_dir))
    sweep_figure(rows, metric).savefig(work_dir / 'sweep.png', dpi=150)
    print(f'written: table.csv, table.md and sweep.png in {work_dir}')
    if failed:
        raise SystemExit(f'{len(failed)} of {len(sweep.runs)} runs failed')


if __name__ == '__main__':
    launch.run(main)
