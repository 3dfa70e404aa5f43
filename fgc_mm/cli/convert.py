# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Convert the weights of another code base for an mmpretrain classifier.

The format is detected.
"""

from __future__ import annotations

import argparse

from .arguments import add_trust

SUBJECT = 'the weights cannot be converted'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('src', help='weight file of another code base')
    parser.add_argument('dst', help='checkpoint to write, for load_from or init_cfg')
    add_trust(parser)


def run(args: argparse.Namespace) -> None:
    from ..files import check_file
    from ..nets.convert import convert_file
    from ..runtime.checkpoints.file import existing

    check_file(args.dst, 'dst')
    print(f'{args.dst}: {convert_file(existing(args.src), args.dst, args.trust_checkpoint)}')
