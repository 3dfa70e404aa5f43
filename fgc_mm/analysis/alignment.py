# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How far gates follow features, and both follow the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from ..coupling import neighbor_overlap
from . import style
from .gate_table import GateTable, short_name
from .optional_packages import need
from .progress import progress

PANELS = {
    'nmi_feature_gate': 'NMI of features and gates',
    'nmi_feature_label': 'NMI of features and classes',
    'nmi_gate_label': 'NMI of gates and classes',
    'overlap': 'neighbor overlap',
}
"""Columns of the table, and what they are called in the figure."""


def align(
    table: GateTable, layer: str, space: str = 'logits', k: int = 10, seed: int = 0
) -> dict[str, float]:
    """The figures of one layer, by the keys of :data:`PANELS`.

    Features and gates are put into as many k-means clusters as there are classes, rows scaled to
    unit length. Of a picture with several classes the main one counts.
    """
    sklearn = need('sklearn.cluster', 'alignment')
    score = need('sklearn.metrics', 'alignment').normalized_mutual_info_score
    labels = table.main_class
    feature, gate = table.feature[layer], table.gates(layer, space).astype(np.float32)
    clusters = []
    for values in (feature, gate):
        unit = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
        count = min(max(2, len(np.unique(labels))), len(table))
        clusters.append(sklearn.KMeans(count, n_init=10, random_state=seed).fit(unit).labels_)
    k = min(k, len(table) - 1)
    return dict(
        nmi_feature_gate=float(score(*clusters)),
        nmi_feature_label=float(score(clusters[0], labels)),
        nmi_gate_label=float(score(clusters[1], labels)),
        overlap=neighbor_overlap(torch.from_numpy(feature), torch.from_numpy(gate), k),
    )


def alignment_rows(
    tables: Mapping[str, GateTable], space: str = 'logits', k: int = 10
) -> list[dict[str, Any]]:
    """A row for each run and layer."""
    rows = []
    with progress('alignment', sum(len(table.layers) for table in tables.values())) as advance:
        for run, table in tables.items():
            for layer in table.layers:
                row = dict(run=run, layer=layer, coupled=layer in table.info.get('coupled', ()))
                rows.append({**row, **align(table, layer, space, k), 'k': k})
                advance()
    return rows


def alignment_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each figure, a line for each run, a star at coupled layers."""
    layers = list(dict.fromkeys(row['layer'] for row in rows))
    with style.figure(max(7.0, 0.5 * len(layers) + 3), 5.6) as figure:
        axes = figure.subplots(2, 2, sharex=True).ravel()
        for place, (column, title) in zip(axes, PANELS.items(), strict=True):
            last = column == 'overlap'
            for number, run in enumerate(dict.fromkeys(row['run'] for row in rows)):
                own = [row for row in rows if row['run'] == run]
                points = [(layers.index(row['layer']), row[column]) for row in own]
                look = style.run_look(number)
                place.plot(*zip(*points, strict=True), label=run, markersize=4, **look)
                stars = [p for p, row in zip(points, own, strict=True) if row['coupled']]
                if stars:
                    label = 'coupled layer' if last else None
                    place.scatter(
                        *zip(*stars, strict=True),
                        marker='*',
                        s=90,
                        color=look['color'],
                        label=label,
                    )
            place.set(
                title=f'{title} @ {rows[0]["k"]}' if last else title,
                ylabel=f'{"share" if last else "NMI"}, 0 to 1',
                ylim=(0, 1),
            )
            place.grid(True)
        names = [short_name(layer, layers) for layer in layers]
        for place in axes[2:]:
            place.set_xticks(range(len(layers)), names, rotation=60, ha='right')
            place.set_xlabel('gated layer')
        handles, labels = axes[3].get_legend_handles_labels()
        figure.legend(handles, labels, loc='outside upper center', ncols=min(4, len(labels)))
    return figure


def analyze_alignment(
    tables: Mapping[str, GateTable], out_dir: Path, space: str = 'logits', k: int = 10
) -> list[Path]:
    """Write ``alignment.csv`` and the figure."""
    rows = alignment_rows(tables, space, k)
    written = [style.write_csv(rows, out_dir / 'alignment.csv')]
    return written + style.save(alignment_figure(rows), out_dir / 'alignment')
