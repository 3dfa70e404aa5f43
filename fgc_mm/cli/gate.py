# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Gate a trained network to a share of its computation, without labels.

The gated network learns to compute what the dense one does, on pictures whose annotations nobody
reads. Writes a config and a checkpoint, which every command takes, and a report.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_checkpoint, add_config, add_launcher

SUBJECT = None  # it trains: an error in the middle comes with its traceback
STEPS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, 'config file of the trained network')
    add_checkpoint(parser)
    parser.add_argument(
        '--target', type=float, required=True, help='share of the MACs to execute, such as 0.5'
    )
    parser.add_argument(
        '--pictures', help="folder of pictures (default: those of the config's training)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument('--steps', type=int, help=f'length of the training (default: {STEPS})')
    length.add_argument('--minutes', type=float, help='how long it may take, in place of --steps')
    parser.add_argument(
        '--static', action='store_true', help='close the same channels for all pictures'
    )
    parser.add_argument(
        '--resume', action='store_true', help='go on with the training in the work dir'
    )
    add_launcher(parser)


def run(args: argparse.Namespace) -> None:
    from ..gating import GatePlan, format_report, gate_checkpoint
    from ..runtime.checkpoints.file import existing
    from .config import load_config

    given = args.work_dir
    cfg = load_config(args)
    if given is None:
        cfg.work_dir = str(Path('work_dirs', f'{Path(args.config).stem}_gate'))
    checkpoint = existing(args.checkpoint)
    steps = args.steps
    if steps is None and args.minutes is None and not args.resume:
        steps = STEPS
    plan = GatePlan(args.target, args.static, args.pictures, steps, args.minutes)
    files, report = gate_checkpoint(cfg, checkpoint, plan, args.resume)
    if not files:
        return
    print(f'\n{format_report(report)}\n')
    for name, path in files.items():
        print(f'{name.capitalize():<11} {path}')
    if args.static:
        print(f'Closed for all pictures; to take them out:  fgc slim {files["config"]} '
              f'{files["checkpoint"]}')  # fmt: skip
