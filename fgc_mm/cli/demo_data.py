# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Build the embedded demo data: real handwritten digits in the layouts of real datasets."""

from __future__ import annotations

import argparse

SUBJECT = 'the demo data cannot be built'
KINDS = ('classification', 'detection', 'segmentation')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--root', default='data/demo', help='where to build (default: %(default)s)')
    parser.add_argument('--kinds', nargs='+', choices=KINDS, default=KINDS, help='default: all')
    parser.add_argument('--force', action='store_true', help='build again what is there already')


def run(args: argparse.Namespace) -> None:
    from ..datasets import ensure_demo_data

    ensure_demo_data(args.root, args.kinds, force=args.force)
    print(f'demo data: {args.root} has {", ".join(args.kinds)}')
