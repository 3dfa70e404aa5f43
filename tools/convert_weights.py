# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Convert the weights of another code base for an mmpretrain classifier."""

from __future__ import annotations

import argparse

from fgc_mm.backbones.convert import FORMATS, convert_file
from fgc_mm.engine import launch


def parse_args() -> argparse.Namespace:
    formats = '\n'.join(f'  {fmt.name}: {fmt.about}' for fmt in FORMATS)
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f'The format is detected:\n{formats}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('src', help='weight file of another code base')
    parser.add_argument('dst', help='checkpoint to write, for load_from or init_cfg')
    launch.add_trust_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    launch.check_file(args.dst, 'dst')
    try:
        conversion = convert_file(launch.existing(args.src), args.dst, args.trust_checkpoint)
    except (OSError, ValueError) as error:
        raise launch.UsageError(str(error)) from error
    print(f'{args.dst}: {conversion}')


if __name__ == '__main__':
    launch.run(main, 'the weights cannot be converted')
