# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Remove the channels of a gated network that no image opens, for good.

Writes a config and a smaller checkpoint, which every command loads, and a report.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .arguments import add_checkpoint, add_config

SUBJECT = 'the network cannot be slimmed'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, 'config file of a model with gates')
    add_checkpoint(parser)
    parser.add_argument('--out-dir', help='where to write (default: next to the checkpoint)')
    parser.add_argument(
        '--split', choices=['val', 'test'], default='val', help='whose images decide'
    )
    parser.add_argument(
        '--tolerance',
        type=float,
        default=0.0,
        help='also remove channels open for at most this share of the images, such as 0.01',
    )
    parser.add_argument('--work-dir', help='where logs go')


def check_owner(config: Path, target: Path) -> None:
    """Refuse to part a config from the slimmed checkpoint it is loaded with."""
    for path in sorted({config, *config.parent.glob('*_slim.py')}):
        text = path.read_text(errors='replace') if path.is_file() else ''
        found = re.search(r'^load_from ?= ?([\'"].+[\'"])$', text, re.MULTILINE)
        if found is None:
            if text and path == config:
                raise UsageError(f'{path} is none of a slimmed network; give --out-dir')
            continue
        loads = Path(ast.literal_eval(found[1]))
        if not loads.is_file():  # the folder was moved
            loads = path.parent / loads.name
        ours = os.path.realpath(loads) == os.path.realpath(target)
        if loads.is_file() and ours != (path == config):
            raise UsageError(
                f'{path} is the config of {loads}, and they would not fit any more; write to '
                'another folder by --out-dir, or remove the two'
            )


def format_report(report: dict[str, Any], equal: float) -> str:
    """The report of a slimming as plain text; up to ``equal``, relative, outputs are the same."""
    gates = report['gates']
    channels = sum(row['channels'] for row in gates)
    removed = sum(row['removed'] for row in gates)
    fixed = sum(row['always_open'] for row in gates)
    rows = {'parameters [M]': 'parameters', 'weights [MB]': 'weights_bytes'}
    rows['file of weights [MB]'] = 'file_bytes'
    lines = [
        f'Slimmed on {report["images"]} images: of {channels} gated channels {removed} removed '
        f'(open for at most {100 * report["tolerance"]:g} % of them), {fixed} open for good',
        '',
        f'{"":<28}{"before":>12}{"after":>12}{"change":>10}',
    ]
    for title, key in rows.items():
        before, after = report[key]['before'] / 1e6, report[key]['after'] / 1e6
        change = 100 * (after / before - 1)
        lines.append(f'{title:<28}{before:>12.3f}{after:>12.3f}{change:>9.1f}%')
    before, after = report['metrics']['before'], report['metrics']['after']
    for name in before:
        old, new = float(before[name]), float(after[name])
        lines.append(f'{name:<28}{old:>12.5g}{new:>12.5g}{_change(old, new):>10}')
    lines += ['', 'macs/pruning_ratio: of the MACs the network before has without gates']
    size, more = report['checkpoint_bytes'], report['checkpoint_also_holds']
    if size and more:
        lines.append(f'The checkpoint has {size / 1e6:.3f} MB: it also holds {", ".join(more)}')
    difference = report['max_difference']
    verdict = 'the same up to rounding' if difference <= equal else 'NOT the same'
    lines += [f'Backbone outputs: {verdict}, largest relative difference {difference:.1e}']
    for row in gates:
        if row['kept_because']:
            lines.append(f'{row["gate"]} keeps all channels: {row["kept_because"]}')
    if not any(row['always_open'] < row['channels'] - row['removed'] for row in gates):
        hooks = ', '.join(report['dropped_hooks'])
        more = f'; the config is without {hooks}, which would find none' if hooks else ''
        lines += [f'No gate is left: the network is a dense one{more}']
    return '\n'.join(lines)


def _change(old: float, new: float) -> str:
    """A difference that is more than rounding."""
    # The MACs of small networks are thousandths of the unit.
    same = abs(new - old) <= 1e-9 * max(abs(old), abs(new))
    return '0' if same else f'{new - old:+.3g}'


def run(args: argparse.Namespace) -> None:
    import torch

    from ..files import check_folder, write_files
    from ..inference import slim_checkpoint
    from ..inference.slim_files import EQUAL
    from ..runtime import launch
    from ..runtime.checkpoints.file import existing
    from .config import load_config

    if not 0 <= args.tolerance < 1:
        raise UsageError(f'--tolerance {args.tolerance} must be within [0, 1)')
    cfg = load_config(args)
    checkpoint = existing(args.checkpoint)
    if '://' in checkpoint and not args.out_dir:
        raise UsageError(f'{checkpoint} lies elsewhere: say where to write by --out-dir')
    folder = Path(args.out_dir) if args.out_dir else Path(checkpoint).parent
    check_folder(folder, '--out-dir')
    stems = {'.py': Path(args.config).stem, '.pth': Path(checkpoint).stem}
    config, target = (folder / f'{stem}_slim{suffix}' for suffix, stem in stems.items())
    check_owner(config, target)
    for key in (f'{args.split}_dataloader', f'{args.split}_evaluator'):
        if cfg.get(key) is None:
            raise UsageError(f'config {args.config} has no {key}, which slimming needs')
    launch.prepare(cfg, splits=(args.split,))
    runner = launch.build_runner(cfg)
    slim_cfg, weights, report = slim_checkpoint(cfg, runner, checkpoint, args.split, args.tolerance)
    slim_cfg.load_from = os.path.abspath(target)
    text = json.dumps(report, indent=2, default=float) + '\n'
    saved = partial(torch.save, weights)
    write_files({target: saved, config: slim_cfg.pretty_text, target.with_suffix('.json'): text})
    print(format_report(report, EQUAL))
    print(
        f'\nConfig      {config}\nCheckpoint  {target}\nReport      {target.with_suffix(".json")}'
    )
