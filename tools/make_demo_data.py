# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Build the embedded demo data: real handwritten digits in the layouts of real datasets."""

from __future__ import annotations

import argparse

from fgc_mm.datasets import DEMO_KINDS, ensure_demo_data
from fgc_mm.engine import launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--root', default='data/demo', help='where to build (default: %(default)s)')
    parser.add_argument(
        '--kinds', nargs='+', choices=DEMO_KINDS, default=DEMO_KINDS, help='what (default: all)'
    )
    parser.add_argument('--force', action='store_true', help='build again what is there already')
    args = parser.parse_args()
    ensure_demo_data(args.root, args.kinds, force=args.force)
    print(f'demo data: {args.root} has {", ".join(args.kinds)}')


if __name__ == '__main__':
    launch.run(main, 'the demo data cannot be built')
