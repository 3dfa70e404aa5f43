# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Strip a checkpoint for publication: weights and what loading needs, the digest in its name."""

import argparse
import os

import fgc_mm  # noqa: F401  checks the versions
from fgc_mm.engine import launch
from fgc_mm.engine.publish import publish


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('checkpoint', help='checkpoint of a training')
    parser.add_argument('out', help='file to write; NAME.pth becomes NAME-<8 digits>.pth')
    parser.add_argument(
        '--no-ema',
        action='store_true',
        help='of a training with EMAHook take the weights as trained, not the averaged ones',
    )
    launch.add_trust_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    launch.check_file(args.out, 'out')
    try:
        final = publish(launch.existing(args.checkpoint), args.out, args.no_ema)
    except (ValueError, OSError) as error:
        raise launch.UsageError(str(error)) from error
    print(f'{final}: {os.path.getsize(final) / 1e6:.1f} MB')


if __name__ == '__main__':
    launch.run(main, 'the checkpoint cannot be published')
