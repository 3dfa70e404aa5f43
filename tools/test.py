# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Test a checkpoint: the task's metric and the computation the gates save."""

import argparse
from pathlib import Path

from mmengine.evaluator import DumpResults

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis import dial_options
from fgc_mm.engine import launch
from fgc_mm.engine.checkpoint_fit import CheckpointFitHook, CheckpointMismatchError
from fgc_mm.evaluation import report
from fgc_mm.inference import add_sparse_hook, has_gated_backbone


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
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
    dial_options.add_arguments(parser)
    launch.add_common_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    suffix = Path(args.out).suffix if args.out else None
    if suffix not in (None, '.json', '.pkl', '.pickle'):
        raise launch.UsageError(f'--out {args.out}: the name must end in .json, .pkl or .pickle')
    if args.out:
        launch.check_file(args.out, '--out')
    if args.show_dir:
        launch.check_folder(args.show_dir, '--show-dir')
    dial_options.check_arguments(args)
    cfg = launch.load_config(args)
    cfg.load_from = launch.existing(args.checkpoint)
    if args.show or args.show_dir:
        launch.draw_predictions(cfg, args.show, args.show_dir, args.wait_time)
    if args.tta:
        launch.augment_test_time(cfg)
    if args.sparse:
        add_sparse_hook(cfg)
    splits = ('test',) if args.budget is None else ('test', args.calibration)
    launch.prepare(cfg, splits=splits)
    report.add_macs_hook(cfg)
    runner = launch.build_runner(cfg)
    if suffix in ('.pkl', '.pickle'):
        runner.test_evaluator.metrics.append(DumpResults(out_file_path=args.out))
    if args.sparse and not has_gated_backbone(runner.model):
        raise launch.UsageError(
            f'--sparse: the model of {args.config} has no gated backbone, so no channel is ever '
            'closed'
        )
    runner.register_hook(CheckpointFitHook(args.checkpoint))
    try:
        if dial_options.is_sweep(args):
            dial_options.run(runner, args)
            return
        dial = dial_options.set_dial(runner, args)
        metrics = report.add_derived(runner.test())
    except CheckpointMismatchError as error:
        raise launch.UsageError(str(error)) from error
    report.print_summary(runner, metrics)
    if suffix == '.json':
        report.write_json(args.out, runner, args.config, args.checkpoint, metrics, **dial)


if __name__ == '__main__':
    launch.run(main, 'the test failed')
