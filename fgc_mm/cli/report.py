# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One page about one or more runs: results, cost, what the gates do, training."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_trust

SUBJECT = 'the report cannot be made'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('work_dirs', nargs='+', help='folders that a training wrote to')
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
    add_trust(parser)


def run(args: argparse.Namespace) -> None:
    from ..analysis.report_page import write_report
    from ..analysis.selection import run_names
    from ..errors import UsageError
    from ..files import check_file

    if args.max_layers < 1:
        raise UsageError(f'--max-layers {args.max_layers} must be 1 or more')
    folders = [Path(folder) for folder in args.work_dirs]
    names = run_names(args.names, [folder.resolve() / 'x' for folder in folders])
    out = Path(args.out) if args.out else folders[0] / 'report.html'
    check_file(out, '--out')
    runs = write_report(
        dict(zip(names, folders, strict=True)),
        out,
        args.split,
        args.max_images,
        args.max_layers,
        not args.no_network,
    )
    for each in runs:
        if each.note:
            print(f'{each.name}: gates are not shown, {each.note}')
    print(out)
