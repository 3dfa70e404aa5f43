# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Accuracy against computation: the curve over budgets or rho, with and without coupling.

    python experiments/tradeoff.py CONFIG --targets 0.3 0.5 0.7
    python experiments/tradeoff.py CONFIG --rho 0.2 0.4 0.8 --seeds 0 1 2
    python experiments/tradeoff.py --collect mine=a/figures.json mine=b/figures.json

Runs are made as experiments/sweep.py makes them: what is done is not done again. At the end:
table.csv, table.md, tradeoff.png and tradeoff.svg.
"""

import argparse
import json
from pathlib import Path

from hook_fields import hook_name
from runs import Run, add_run_arguments, execute_all, print_commands
from sweep_figures import collect
from sweep_points import curves, make_runs

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis import style
from fgc_mm.analysis.tradeoff import (
    RATIO,
    Row,
    point_label,
    read_figures,
    task_metric,
    tradeoff_figure,
    write_table,
)
from fgc_mm.cli.run import run as run_command
from fgc_mm.errors import UsageError
from fgc_mm.files import check_folder
from fgc_mm.runtime.config.files import read_config

WAYS = {'both': (True, False), 'with': (True,), 'without': (False,)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', nargs='?', help='config file to train variants of')
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        '--targets', type=float, nargs='+', help="shares of the backbone's MACs, by BudgetHook"
    )
    what.add_argument('--rho', type=float, nargs='+', help='weights of the loss of L0Hook')
    what.add_argument(
        '--collect',
        nargs='+',
        metavar='CURVE=FILE',
        help='no training: files that tools/test.py --out wrote, and the curve each is on',
    )
    parser.add_argument(
        '--coupling',
        choices=list(WAYS),
        help='with and without FGC; by default both if the config has an FGCHook',
    )
    add_run_arguments(parser, seeds=[0])
    return parser.parse_args()


def runs_of(args: argparse.Namespace, work_dir: Path) -> list[Run]:
    """A run for every setting, way and seed."""
    if args.config is None:
        raise UsageError('--targets and --rho need a config to train')
    hooks = read_config(args.config).get('custom_hooks') or []
    for target in args.targets or []:
        if not 0 < target <= 1:
            raise UsageError(
                f"--targets {target:g} must be within (0, 1], the share of the backbone's MACs"
            )
    for rho in args.rho or []:
        if not rho >= 0:
            raise UsageError(f'--rho {rho:g} must be 0 or more, a weight of a loss')
    coupled = 'FGCHook' in map(hook_name, hooks)
    if args.coupling in ('both', 'with') and not coupled:
        raise UsageError(
            f'--coupling {args.coupling}: the config has no FGCHook in custom_hooks; name a config '
            'that has'
        )
    ways = WAYS[args.coupling or 'both'] if coupled else ()
    key, values = ('L0Hook.rho', args.rho) if args.rho else ('BudgetHook.target', args.targets)
    points = curves(key, values, ways)
    tools = Path(__file__).parents[1] / 'tools'
    return make_runs(args.config, points, args.seeds, work_dir, args.cfg_options, tools, args.flags)


def collected(args: argparse.Namespace) -> tuple[str, list[Row]]:
    """Rows of finished tests."""
    tests = []
    for item in args.collect:
        curve, equals, path = item.partition('=')
        if not equals or not Path(path).is_file():
            raise UsageError(
                f'--collect {item}: write CURVE=FILE with a file that tools/test.py --out wrote'
            )
        figures = read_figures(Path(path))
        points = json.loads(Path(path).read_text()).get('points', [{}])
        labels = [', '.join(filter(None, [path, point_label(point)])) for point in points]
        tests += [(curve, *test) for test in zip(labels, figures, strict=True)]
    name = task_metric([metrics for *_, metrics in tests], args.metric, rising=True)
    rows = [Row(f'{curve}, {label}', curve, [m[name]], [m[RATIO]]) for curve, label, m in tests]
    return name, rows


def main() -> None:
    args = parse_args()
    title = Path(args.config).stem if args.config else 'collected'
    work_dir = Path(args.work_dir or f'work_dirs/tradeoff_{title}')
    check_folder(work_dir, '--work-dir')
    runs, failed = [], 0
    if args.collect:
        metric, rows = collected(args)
    else:
        runs = runs_of(args, work_dir)
        if args.dry_run:
            print_commands(runs)
            return
        failed = 0 if args.report else execute_all(runs)
        metric, rows = collect(runs, args.metric, rising=True)
    work_dir.mkdir(parents=True, exist_ok=True)
    print(write_table(rows, metric, work_dir))
    style.save(tradeoff_figure(rows, metric, title), work_dir / 'tradeoff')
    print(f'written: table.csv, table.md, tradeoff.png and tradeoff.svg in {work_dir}')
    if failed:
        raise SystemExit(f'{failed} of {len(runs)} runs failed')


if __name__ == '__main__':
    run_command(main, 'the runs failed')
