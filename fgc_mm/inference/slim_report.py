# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What tools/slim.py prints."""

from __future__ import annotations

from typing import Any

EQUAL = 1e-4
"""Relative difference up to which outputs count as the same."""


def format_slim_report(report: dict[str, Any]) -> str:
    """The report of :func:`slim_checkpoint` as plain text.

    Args:
        report (dict): The report.
    """
    gates = report['gates']
    channels = sum(row['channels'] for row in gates)
    removed = sum(row['removed'] for row in gates)
    fixed = sum(row['always_open'] for row in gates)
    rows = [('parameters', report['parameters'], 1e6, 'M')]
    rows += [('weights', report['weights_bytes'], 1e6, 'MB')]
    rows += [('file of weights', report['file_bytes'], 1e6, 'MB')]
    lines = [
        f'Slimmed on {report["images"]} images: of {channels} gated channels {removed} removed '
        f'(open for at most {100 * report["tolerance"]:g} % of them), {fixed} open for good',
        '',
        f'{"":<28}{"before":>12}{"after":>12}{"change":>10}',
    ]
    for name, pair, unit, suffix in rows:
        change = 100 * (pair['after'] / pair['before'] - 1)
        before, after = pair['before'] / unit, pair['after'] / unit
        lines.append(
            f'{name + " [" + suffix + "]":<28}{before:>12.3f}{after:>12.3f}{change:>9.1f}%'
        )
    before, after = report['metrics']['before'], report['metrics']['after']
    for name in before:
        old, new = float(before[name]), float(after[name])
        lines.append(f'{name:<28}{old:>12.5g}{new:>12.5g}{_change(old, new):>10}')
    lines += ['', 'macs/pruning_ratio: of the MACs the network before has without gates']
    size, more = report['checkpoint_bytes'], report['checkpoint_also_holds']
    if size and more:
        lines.append(f'The checkpoint has {size / 1e6:.3f} MB: it also holds {", ".join(more)}')
    difference = report['max_difference']
    verdict = 'the same up to rounding' if difference <= EQUAL else 'NOT the same'
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
