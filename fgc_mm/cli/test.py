# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Test a checkpoint: the task's metric and the computation the gates save."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import dial
from .arguments import add_checkpoint, add_config, add_launcher

SUBJECT = 'the test failed'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_checkpoint(parser)
    parser.add_argument(
        '--out', help='write the figures to a .json file, or all predictions to a .pkl file'
    )
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', help='folder for pictures with the predictions drawn in')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds a window stays')
    parser.add_argument('--tta', action='store_true', help="the config's test-time augmentation")
    parser.add_argument(
        '--sparse', action='store_true', help='compute open channels only, with the same results'
    )
    dial.add_arguments(parser)
    add_launcher(parser)


def run(args: argparse.Namespace) -> None:
    from mmengine.evaluator import DumpResults

    from ..errors import UsageError
    from ..evaluation import GatedMACs, summary
    from ..evaluation.checkpoint_fit import CheckpointFitHook
    from ..files import check_file, check_folder
    from ..inference import add_sparse_hook
    from ..runtime import launch
    from ..runtime.checkpoints.file import existing
    from .config import load_config

    suffix = Path(args.out).suffix if args.out else None
    if suffix not in (None, '.json', '.pkl', '.pickle'):
        raise UsageError(f'--out {args.out}: the name must end in .json, .pkl or .pickle')
    if args.out:
        check_file(args.out, '--out')
    if args.show_dir:
        check_folder(args.show_dir, '--show-dir')
    dial.check_arguments(args)
    cfg = load_config(args)
    cfg.load_from = existing(args.checkpoint)
    if args.show or args.show_dir:
        launch.draw_predictions(cfg, args.show, args.show_dir, args.wait_time)
    if args.tta:
        launch.augment_test_time(cfg)
    if args.sparse:
        add_sparse_hook(cfg)
    splits = ('test',) if args.budget is None else ('test', args.calibration)
    launch.prepare(cfg, splits=splits)
    summary.add_macs_hook(cfg)
    runner = launch.build_runner(cfg)
    if suffix in ('.pkl', '.pickle'):
        runner.test_evaluator.metrics.append(DumpResults(out_file_path=args.out))
    runner.register_hook(CheckpointFitHook(args.checkpoint))
    if dial.is_sweep(args):
        dial.sweep(runner, args)
        return
    threshold = dial.set_dial(runner, args)
    metrics = summary.add_derived(runner.test())
    summary.print_summary(metrics)
    if suffix == '.json':
        counted = (m.layer_table for m in runner.test_evaluator.metrics if isinstance(m, GatedMACs))
        tested = dict(config=args.config, checkpoint=args.checkpoint, **threshold)
        summary.dump(args.out, dict(**tested, metrics=metrics, layers=next(counted, [])))
