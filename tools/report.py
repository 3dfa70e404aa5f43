# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One page about one or more runs: results, cost, what the gates do, training."""

import argparse
from pathlib import Path

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis.commands import run_names
from fgc_mm.analysis.extra import MissingExtraError
from fgc_mm.analysis.report import write_report
from fgc_mm.engine import launch


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('work_dirs', nargs='+', help='folders that tools/train.py wrote to')
    parser.add_argument('--out', help="the page (default: report.html in the first run's folder)")
    parser.add_argument('--names', nargs='+', help='of the runs, in the same order')
    parser.add_argument('--split', choices=['val', 'test'], default='test')
    parser.add_argument(
        '--max-images', type=int, default=300, help='pictures to look at, 300 by default'
    )
    parser.add_argument(
        '--max-layers', type=int, default=8, help='layers to choose from, 8 by default'
    )
    parser.add_argument(
        '--no-network', action='store_true', help='only what the logs and figures.json tell'
    )
    launch.add_trust_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.max_layers < 1:
        raise launch.UsageError(f'--max-layers {args.max_layers} must be 1 or more')
    folders = [Path(folder) for folder in args.work_dirs]
    names = run_names(args.names, [folder.resolve() / 'x' for folder in folders])
    out = Path(args.out) if args.out else folders[0] / 'report.html'
    launch.check_file(out, '--out')
    try:
        runs = write_report(
            dict(zip(names, folders, strict=True)),
            out,
            args.split,
            args.max_images,
            args.max_layers,
            not args.no_network,
        )
    except MissingExtraError as error:
        raise launch.UsageError(str(error)) from error
    for run in runs:
        if run.note:
            print(f'{run.name}: gates are not shown, {run.note}')
    print(out)


if __name__ == '__main__':
    launch.run(main, 'the report cannot be made')
