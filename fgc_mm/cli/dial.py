# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The evaluation-time dial as options of ``fgc test``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError, in_context

if TYPE_CHECKING:
    from mmengine.runner import Runner

_MISSED = 0.02  # share by which a budget may be missed before that is said


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


def set_dial(runner: Runner, args: argparse.Namespace) -> dict[str, float]:
    """Set the threshold that was asked for; the figures tell it, if there is one."""
    from mmengine.dist import is_main_process

    from ..gates import set_threshold
    from ..runtime import unwrap

    if args.threshold is None and args.budget is None:
        return {}
    runner.load_or_resume()
    ((setting, threshold),) = _thresholds(runner, args)
    set_threshold(unwrap(runner.model), threshold)
    if args.budget is not None and is_main_process():
        print(f'budget {setting:g}: threshold {threshold:.4g}')
    return {'threshold': threshold}


def sweep(runner: Runner, args: argparse.Namespace) -> None:
    """Test at every setting, print the table, and write it and the plot.

    The files are ``dial.json``, ``dial.csv``, ``dial.md``, ``dial.png`` and ``dial.svg``
    in the work dir, or named as ``--out``.
    """
    from mmengine.dist import is_main_process

    from ..analysis import style, tradeoff
    from ..evaluation import summary
    from ..gates import set_threshold
    from ..runtime import unwrap

    runner.load_or_resume()
    kind = 'threshold' if args.budget is None else 'budget'
    points, rows = [], []
    for setting, threshold in _thresholds(runner, args):
        set_threshold(unwrap(runner.model), threshold)
        metrics = summary.add_derived(runner.test())
        points.append({kind: setting, 'threshold': threshold, 'metrics': metrics})
        with in_context('--metric'):
            name = tradeoff.task_metric([metrics], args.metric, rising=True)
        figures = [float(metrics[name])], [float(metrics[tradeoff.RATIO])]
        rows.append(tradeoff.Row(tradeoff.point_label(points[-1]), '', *figures))
    if not is_main_process():
        return
    target = Path(args.out) if args.out else Path(runner.work_dir) / 'dial.json'
    summary.dump(target, dict(config=args.config, checkpoint=args.checkpoint, points=points))
    print('\n' + tradeoff.write_table(rows, name, target.parent, target.stem))
    network = f'{Path(args.config).stem}, {Path(args.checkpoint).name}'
    title = f'{network}, at {len(rows)} thresholds of its gates'
    style.save(tradeoff.tradeoff_figure(rows, name, title), target.with_suffix(''))
    print(f'written: {target}, the table as .csv and .md, and the plot as .png and .svg')


def _thresholds(runner: Runner, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Pairs of what was asked for and its threshold."""
    from ..evaluation import ThresholdDial, calibration_batches, counted_backbone
    from ..gates import set_threshold
    from ..runtime import unwrap

    if args.budget is None:
        return [(threshold, threshold) for threshold in args.threshold]
    set_threshold(unwrap(runner.model), 0.5)  # says so if there are no gates
    with in_context(f'--calibration {args.calibration}'):
        batches = calibration_batches(runner, args.calibration, args.calibration_images or None)
        runner.model.eval()
        dial = ThresholdDial(runner.model, batches, counted_backbone(runner.cfg))
    with in_context('--budget'):
        found = [(budget, dial.find(budget)) for budget in args.budget]
    for budget, threshold in found:
        share = dial.share(threshold)  # measured on the way
        if abs(share - budget) > _MISSED:
            runner.logger.warning(
                f'--budget {budget:g}: many channels close at the same threshold; the nearest one, '
                f"{threshold:.4g}, executes {share:.3f} of the backbone's MACs on the calibration "
                'set'
            )
    return found
