# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Train any detector, segmentor or classifier from its config."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import add_config, add_launcher, add_trust

SUBJECT = None  # it runs for days: an error in the middle comes with its traceback


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='go on from this checkpoint, or from the latest one in the work dir',
    )
    parser.add_argument('--amp', action='store_true', help='mixed precision (needs a GPU)')
    parser.add_argument(
        '--auto-scale-lr', action='store_true', help='scale the learning rate with the batch size'
    )
    add_launcher(parser)
    add_trust(parser)


def _merge(cfg: Any, args: argparse.Namespace) -> None:
    import torch

    from ..errors import UsageError
    from ..runtime.checkpoints.resume_point import go_on

    if args.amp:
        if not torch.cuda.is_available():
            raise UsageError('--amp needs a GPU: mmengine trains in mixed precision on CUDA only')
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise UsageError(
                '--auto-scale-lr: the config has no auto_scale_lr.base_batch_size; add '
                'auto_scale_lr = dict(base_batch_size=<images per step its lr is meant for>)'
            )
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        go_on(cfg, None if args.resume == 'auto' else args.resume)


def run(args: argparse.Namespace) -> None:
    from ..runtime import SafeCheckpointHook, launch
    from ..training.new_gates_hook import NewGatesHook
    from .config import load_config

    cfg = load_config(args)
    _merge(cfg, args)
    launch.prepare(cfg, splits=('train', 'val'))
    runner = launch.build_runner(cfg)
    SafeCheckpointHook.of(runner)
    runner.register_hook(NewGatesHook())
    runner.train()
