# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Strip a checkpoint for publication: weights and what loading needs, the digest in its name."""

from __future__ import annotations

import argparse
import os

from .arguments import add_checkpoint

SUBJECT = 'the checkpoint cannot be published'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument('out', help='file to write; NAME.pth becomes NAME-<8 digits>.pth')
    parser.add_argument(
        '--no-ema',
        action='store_true',
        help='of a training with EMAHook take the weights as trained, not the averaged ones',
    )


def run(args: argparse.Namespace) -> None:
    from ..files import check_file
    from ..runtime.checkpoints.file import existing
    from ..runtime.checkpoints.publish import publish

    check_file(args.out, 'out')
    final = publish(existing(args.checkpoint), args.out, args.no_ema)
    print(f'{final}: {os.path.getsize(final) / 1e6:.1f} MB')
