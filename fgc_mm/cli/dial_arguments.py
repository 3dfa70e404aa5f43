# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The evaluation-time dial as options of ``fgc test``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    dial = parser.add_argument_group('gate threshold', 'one network, many budgets')
    dial.add_argument(
        '--threshold',
        type=float,
        nargs='+',
        metavar='T',
        help='probability above which a channel is open; several make a table and a plot',
    )
    dial.add_argument(
        '--budget',
        type=float,
        nargs='+',
        metavar='SHARE',
        help="share of the backbone's MACs to execute, the threshold for it is found on a "
        'calibration set; several make a table and a plot',
    )
    dial.add_argument(
        '--calibration',
        choices=['train', 'val', 'test'],
        default='val',
        help='split whose images --budget is calibrated on, through its own pipeline',
    )
    dial.add_argument(
        '--calibration-images', type=int, default=256, help='as many of them, 0 for all'
    )
    dial.add_argument('--metric', help="metric of the plot; the first of the task's by default")


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot be meant, before anything is loaded."""
    if args.threshold is not None and args.budget is not None:
        raise UsageError('--threshold and --budget both set the threshold; give one of them')
    for threshold in args.threshold or []:
        if not 0 < threshold < 1:
            raise UsageError(f'--threshold {threshold:g} must be within (0, 1)')
    for budget in args.budget or []:
        if not 0 < budget <= 1:
            raise UsageError(
                f"--budget {budget:g} must be within (0, 1], the share of the backbone's MACs to "
                'execute'
            )
    if args.calibration_images < 0:
        raise UsageError(f'--calibration-images {args.calibration_images} must be 0 or more')
    if args.metric and not is_sweep(args):
        raise UsageError(
            f'--metric {args.metric} chooses what the plot of several settings shows; give several '
            'to --threshold or --budget'
        )
    if is_sweep(args) and args.out and Path(args.out).suffix != '.json':
        raise UsageError(f'--out {args.out}: the figures of several settings go to a .json file')


def is_sweep(args: argparse.Namespace) -> bool:
    """Whether several settings were asked for."""
    return len(args.threshold or args.budget or []) > 1
