# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Picture of benchmarks/fgc.py: what a layer of coupling costs against the number of instances."""

from __future__ import annotations

import statistics
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from fgc_mm.analysis import style

WAYS = dict(ours='fgc_mm', plain='plain way')


def draw(results: list[dict], path: Path, caption: str) -> list[Path]:
    """Draw the figures of a run, as ``.png`` and as ``.svg``.

    Args:
        results (list[dict]): See :func:`figure`.
        path (Path): The picture to write, with one of the two endings.
        caption (str): The setting.

    Returns:
        list[Path]: What was written.
    """
    return style.save(figure(results, caption), path.with_suffix(''))


def figure(results: list[dict], caption: str) -> Figure:
    """Time and memory of one layer and step against N, both logarithmic.

    Args:
        results (list[dict]): For each ``size`` the ``times`` of each way in
            seconds, and under the way's own name its MB beyond the banks; the
            plain way may be missing.
        caption (str): The setting.
    """
    with style.figure(9, 3.6) as drawn:
        axes = drawn.subplots(1, 2)
        for number, (name, label) in enumerate(WAYS.items()):
            have = [r for r in results if name in r]
            sizes = [r['size'] for r in have]
            times = [statistics.median(r['times'][name]) * 1e3 for r in have]
            look = style.run_look(number)
            axes[0].plot(sizes, times, label=label, **look)
            axes[1].plot(sizes, [max(1, r[name]) for r in have], label=label, **look)
        for axis, what in zip(
            axes, ('time of a layer and step, ms', 'memory beyond the banks, MB'), strict=True
        ):
            axis.set(xscale='log', yscale='log', xlabel='instances N', ylabel=what)
            # A decade has a number in between, or less than one would show a single number.
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_formatter('{x:,.0f}')
                side.set_minor_formatter('')
            axis.grid(True, which='both')
            axis.legend()
        drawn.suptitle(caption, fontsize=9)
    return drawn
