# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Accuracy against computation: train over budgets, or over rho, with and without
coupling, and write the table and the plot. What is trained is not trained again.

    python tools/tradeoff.py configs/demo/resnet18_digits_fgc.py --targets 0.3 0.5 0.7
    python tools/tradeoff.py configs/demo/resnet18_digits_fgc.py --rho 0.2 0.4 0.8 --seeds 0 1 2
    python tools/tradeoff.py --collect mine=work_dirs/a/figures.json mine=work_dirs/b/figures.json
"""

import argparse
from pathlib import Path

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis import Point, Run, point_of, read_figures, task_metric, vary, write
from fgc_mm.engine import launch

TOOLS = Path(__file__).parent
CURVES = {True: 'with FGC', False: 'without FGC'}


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
        choices=['both', 'with', 'without'],
        help='with and without FGC; by default both if the config has an FGCHook',
    )
    parser.add_argument('--seeds', type=int, nargs='+', default=[0])
    parser.add_argument('--metric', help="metric of the plot; the first of the task's by default")
    parser.add_argument('--work-dir', help='default: work_dirs/tradeoff/<config>')
    parser.add_argument(
        '--cfg-options', nargs='+', default=[], help='for training and testing, as key=value'
    )
    return parser.parse_args()


def collect(args: argparse.Namespace) -> tuple[list[Point], str]:
    """Points of finished runs."""
    points, name = [], args.metric
    for item in args.collect:
        curve, equals, path = item.partition('=')
        if not equals or not Path(path).is_file():
            raise launch.UsageError(
                f'--collect {item}: write CURVE=FILE with a file that tools/test.py --out wrote'
            )
        try:
            figures = read_figures(Path(path))
            name = task_metric(figures, args.metric)
            share = 1 - figures['macs/pruning_ratio'] / 100
            points.append(point_of(figures, curve, round(share, 4), name, file=path))
        except ValueError as error:
            raise launch.UsageError(f'--collect {item}: {error}') from None
    return points, str(name)


def train(args: argparse.Namespace, folder: Path) -> tuple[list[Point], str]:
    """Points of runs that are trained unless they are there."""
    base = launch.load_config(argparse.Namespace(**{**vars(args), **NO_OPTIONS}))
    has_fgc = any('FGCHook' in str(hook.get('type')) for hook in base.get('custom_hooks') or [])
    choice = args.coupling or ('both' if has_fgc else 'without')
    ways = dict(both=[True, False])
    ways.update({'with': [True], 'without': [False]})
    kind, settings = ('target', args.targets) if args.targets else ('rho', args.rho)
    for target in args.targets or []:
        if not 0 < target <= 1:
            raise launch.UsageError(
                f"--targets {target:g} must be within (0, 1], the share of the backbone's MACs"
            )
    points, name = [], args.metric
    for way in ways[choice]:
        for setting in settings:
            for seed in args.seeds:
                try:
                    cfg = vary(base, coupling=way, seed=seed, **{kind: setting})
                except ValueError as error:
                    raise launch.UsageError(f'--coupling {choice}: {error}') from None
                place = folder / f'{"fgc" if way else "gated"}_{kind}{setting:g}_seed{seed}'
                figures = Run(cfg, place, TOOLS).figures(args.cfg_options)
                try:
                    name = task_metric(figures, args.metric)
                except ValueError as error:
                    raise launch.UsageError(f'--metric: {error}') from None
                points.append(point_of(figures, CURVES[way], setting, name, seed=seed))
                # After each run, so that a stopped sweep leaves what it has.
                write(points, kind, name, folder, 'tradeoff', base_title(args))
    return points, str(name)


NO_OPTIONS = dict(launcher='none', local_rank=0, cfg_options=None, work_dir=None)


def base_title(args: argparse.Namespace) -> str:
    return Path(args.config).stem if args.config else ''


def main() -> None:
    args = parse_args()
    if args.collect is None and args.config is None:
        raise launch.UsageError('--targets and --rho need a config to train')
    default = Path('work_dirs/tradeoff') / (base_title(args) or 'collected')
    folder = Path(args.work_dir) if args.work_dir else default
    if args.collect is not None:
        points, metric = collect(args)
        kind = 'share'
    else:
        points, metric = train(args, folder)
        kind = 'target' if args.targets else 'rho'
    print('\n' + write(points, kind, metric, folder, 'tradeoff', base_title(args)))
    print(f'The table and the plot are in {folder}/tradeoff.*')


if __name__ == '__main__':
    launch.run(main)
