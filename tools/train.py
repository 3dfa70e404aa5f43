# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Train any detector, segmentor or classifier from its config."""

import argparse

import torch
from mmengine.config import Config

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.engine import SafeCheckpointHook, launch
from fgc_mm.engine.resume_point import go_on
from fgc_mm.engine.start_weights import NewGatesHook


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
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
    launch.add_common_arguments(parser)
    return parser.parse_args()


def merge_train_args(cfg: Config, args: argparse.Namespace) -> None:
    if args.amp:
        if not torch.cuda.is_available():
            raise launch.UsageError(
                '--amp needs a GPU: mmengine trains in mixed precision on CUDA only'
            )
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise launch.UsageError(
                '--auto-scale-lr: the config has no auto_scale_lr.base_batch_size; add '
                'auto_scale_lr = dict(base_batch_size=<images per step its lr is meant for>)'
            )
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        go_on(cfg, None if args.resume == 'auto' else args.resume)


def main() -> None:
    args = parse_args()
    cfg = launch.load_config(args)
    merge_train_args(cfg, args)
    launch.prepare(cfg, splits=('train', 'val'))
    runner = launch.build_runner(cfg)
    SafeCheckpointHook.of(runner)
    runner.register_hook(NewGatesHook())
    runner.train()


if __name__ == '__main__':
    launch.run(main)
