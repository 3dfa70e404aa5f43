# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Train and test a config with other settings of its hooks: the paper's ablations or your own.

Every run has a folder below the work dir and is skipped once it has its figures.json, so the
same command goes on where it was stopped. At the end: table.csv and table.md, sweep.png and
sweep.svg.
"""

import argparse
from pathlib import Path

from runs import Run, add_run_arguments, execute_all, print_commands
from sweep_figures import collect, sweep_figure
from sweep_points import ABLATIONS, grid, make_runs

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis import style
from fgc_mm.analysis.tradeoff import write_table
from fgc_mm.cli.run import run as run_command
from fgc_mm.files import check_folder
from fgc_mm.runtime.config.files import read_config


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'config', nargs='?', default='configs/paper/resnet20_fgc_cifar10.py', help='base config'
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
    add_run_arguments(parser)
    return parser.parse_args()


def runs_of(args: argparse.Namespace) -> tuple[list[Run], Path]:
    hooks = read_config(args.config).get('custom_hooks') or []
    points = ABLATIONS[args.ablation] if args.ablation else grid(args.set, hooks)
    name = args.ablation or '_'.join(key for key, *_ in args.set)
    work_dir = Path(args.work_dir or f'work_dirs/sweep_{name}_{Path(args.config).stem}')
    tools = Path(__file__).parents[1] / 'tools'
    runs = make_runs(args.config, points, args.seeds, work_dir, args.cfg_options, tools, args.flags)
    return runs, work_dir


def main() -> None:
    args = parse_args()
    runs, work_dir = runs_of(args)
    check_folder(work_dir, '--work-dir')
    if args.dry_run:
        print_commands(runs)
        return
    failed = 0 if args.report else execute_all(runs)
    metric, rows = collect(runs, args.metric)
    print(write_table(rows, metric, work_dir))
    style.save(sweep_figure(rows, metric), work_dir / 'sweep')
    print(f'written: table.csv, table.md, sweep.png and sweep.svg in {work_dir}')
    if failed:
        raise SystemExit(f'{failed} of {len(runs)} runs failed')


if __name__ == '__main__':
    run_command(main, 'the sweep failed')
