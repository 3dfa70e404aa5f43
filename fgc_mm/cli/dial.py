# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The evaluation-time dial as options of tools/test.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmengine.dist import is_main_process
from mmengine.runner import Runner

from ..analysis.figures_file import point_label
from ..errors import in_context
from ..evaluation import GatedMACsHook, ThresholdDial, calibration_batches
from ..evaluation import summary as report
from ..gates import set_threshold
from ..runtime import unwrap

_MISSED = 0.02  # share by which a budget may be missed before that is said


def set_dial(runner: Runner, args: argparse.Namespace) -> dict[str, float]:
    """Set the threshold that was asked for, if one was.

    Returns:
        dict[str, float]: The ``threshold`` that was set, for the figures.
    """
    if args.threshold is None and args.budget is None:
        return {}
    runner.load_or_resume()
    ((setting, threshold),) = _thresholds(runner, args)
    set_threshold(unwrap(runner.model), threshold)
    if args.budget is not None and is_main_process():
        print(f'budget {setting:g}: threshold {threshold:.4g}')
    return {'threshold': threshold}


def run(runner: Runner, args: argparse.Namespace) -> None:
    """Test at every setting, print the table, and write it and the plot.

    The files are ``dial.json``, ``dial.csv``, ``dial.md``, ``dial.png`` and ``dial.svg``
    in the work dir, or named as ``--out``.
    """
    from ..analysis import style
    from ..analysis.tradeoff import RATIO, Row, task_metric, tradeoff_figure, write_table

    runner.load_or_resume()
    kind = 'threshold' if args.budget is None else 'budget'
    points, rows = [], []
    for setting, threshold in _thresholds(runner, args):
        set_threshold(unwrap(runner.model), threshold)
        metrics = report.add_derived(runner.test())
        point = {kind: setting, 'threshold': threshold, 'metrics': metrics}
        points.append(point)
        with in_context('--metric'):
            name = task_metric([metrics], args.metric, rising=True)
        row = Row(point_label(point), '', [float(metrics[name])], [float(metrics[RATIO])])
        rows.append(row)
    if not is_main_process():
        return
    target = Path(args.out) if args.out else Path(runner.work_dir) / 'dial.json'
    report.dump(target, dict(config=args.config, checkpoint=args.checkpoint, points=points))
    print('\n' + write_table(rows, name, target.parent, target.stem))
    network = f'{Path(args.config).stem}, {Path(args.checkpoint).name}'
    figure = tradeoff_figure(rows, name, f'{network}, at {len(rows)} thresholds of its gates')
    style.save(figure, target.with_suffix(''))
    print(f'written: {target}, the table as .csv and .md, and the plot as .png and .svg')


def _thresholds(runner: Runner, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Pairs of what was asked for and its threshold."""
    if args.budget is None:
        return [(threshold, threshold) for threshold in args.threshold]
    set_threshold(unwrap(runner.model), 0.5)  # says so if there are no gates
    hook = next(hook for hook in runner.hooks if isinstance(hook, GatedMACsHook))
    with in_context(f'--calibration {args.calibration}'):
        batches = calibration_batches(runner, args.calibration, args.calibration_images or None)
        runner.model.eval()
        dial = ThresholdDial(runner.model, batches, hook.backbone)
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
