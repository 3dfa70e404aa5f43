# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What each picture costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..tasks import task_named
from . import style
from .gate_table import GateTable
from .optional_packages import need
from .thumbnails import Thumbnails, show

EXTREMES = 6
"""How many of the cheapest and of the dearest pictures are shown."""


def cost_rows(table: GateTable) -> list[dict[str, Any]]:
    """A row for each picture, the cheapest first; MACs of the backbone in 10^9."""
    rows = [
        dict(
            picture=number,
            executed_G=float(executed) / 1e9,
            dense_G=float(dense) / 1e9,
            share=float(executed / dense),
            objects=int(table.objects[number]),
            category=category,
            path=table.paths[number],
        )
        for number, ((executed, dense, *_), category) in enumerate(
            zip(table.macs, table.categories, strict=True)
        )
    ]
    return sorted(rows, key=lambda row: row['executed_G'])


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation; NaN if one is constant."""
    if min(len(np.unique(a)), len(np.unique(b))) < 2:
        return float('nan')
    return float(need('scipy.stats', "Spearman's correlation").spearmanr(a, b).statistic)


def cost_figure(table: GateTable, pictures: Thumbnails) -> Figure:
    """Histogram of MACs, the cheapest and dearest pictures, and MACs against objects."""
    rows = cost_rows(table)
    macs, dense = table.macs[:, 0] / 1e9, table.macs[:, 1].mean() / 1e9
    task = task_named(table.info.get('task'))
    with style.figure(8.5, 5.6) as figure:
        top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=[1.2, 1])[:, 0]
        plots = top.subplots(1, 1 if task.one_class else 2, squeeze=False)[0]
        plots[0].hist(macs, bins=min(40, max(5, len(rows) // 8)), color=style.RUNS[0])
        plots[0].axvline(macs.mean(), color=style.RUNS[1], linestyle='--')
        plots[0].yaxis.set_major_locator(MaxNLocator(integer=True))
        plots[0].set(
            xlabel='executed MACs of the backbone per picture, 10⁹',
            ylabel='pictures',
            title=f'mean {macs.mean():.4g} (dashed) of {dense:.4g} without gates',
        )
        for plot in plots[1:]:
            jitter = np.random.default_rng(0).uniform(-0.15, 0.15, len(macs))
            plot.scatter(table.objects + jitter, macs, s=9, alpha=0.6, color=style.RUNS[0])
            plot.xaxis.set_major_locator(MaxNLocator(integer=True))
            title = f"Spearman's rank correlation {rank_correlation(table.objects, macs):.2f}"
            plot.set(xlabel=task.objects_name, ylabel='executed MACs, 10⁹', title=title)
        found = {'cheapest': rows[:EXTREMES], 'dearest': rows[-EXTREMES:]}
        galleries = bottom.subplots(2, min(EXTREMES, len(rows)), squeeze=False)
        for line, (name, own) in zip(galleries, found.items(), strict=True):
            for place, row in zip(line, own, strict=True):
                text = f'{row["executed_G"]:#.4g} · 10⁹\nclass {row["category"]}'
                show(place, pictures.read(row['picture']), text)
            line[0].text(
                -0.12, 0.5, name, rotation=90, ha='right', va='center', transform=line[0].transAxes
            )
    return figure


def analyze_cost(table: GateTable, pictures: Thumbnails, out_dir: Path) -> list[Path]:
    """Write ``cost.csv``, ``cost_layers.csv`` and the figure."""
    written = [
        style.write_csv(cost_rows(table), out_dir / 'cost.csv'),
        style.write_csv(table.costs, out_dir / 'cost_layers.csv'),
    ]
    return written + style.save(cost_figure(table, pictures), out_dir / 'cost')
