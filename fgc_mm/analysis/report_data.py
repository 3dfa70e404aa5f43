# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What the charts of a report are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from ..tasks import task_named
from . import style
from .alignment import PANELS, alignment_rows
from .cost import EXTREMES, cost_rows, rank_correlation
from .embedding import class_groups, embed_table
from .frequency import patterns
from .gate_table import GateTable, short_name
from .nearest_pictures import default_queries, galleries
from .progress import progress
from .report_runs import ReportRun
from .thumbnails import Thumbnails, spread_out
from .training import UNITS, Curve, curve_label, is_detail, panels

_POINTS = 250  # of a training curve


def payload(runs: Sequence[ReportRun], max_layers: int = 8, k: int = 10) -> dict[str, Any]:
    """Everything the page's script needs, as plain lists and numbers."""
    thumbs: dict[str, str] = {}  # the same picture of several runs is there once
    own = [_run(run, max_layers, thumbs) for run in runs]
    tables = {run.name: run.table for run in runs if run.table is not None}
    aligned = alignment_rows(tables, k=k) if tables else []
    for row in aligned:
        row['layer'] = short_name(row['layer'], tables[row['run']].layers)
        row.update({column: _round(row[column]) for column in PANELS})
    layers = list(dict.fromkeys(layer for run in own for layer in run['layers']))
    return dict(
        runs=own,
        layers=layers,
        thumbs=list(thumbs.values()),
        units=UNITS,
        alignment=dict(rows=aligned, panels=PANELS, k=k),
        colors=dict(
            runs=style.RUNS,
            classes=style.CLASSES,
            other=style.OTHER,
            sequential=style.color_scale(style.SEQUENTIAL),
            diverging=style.color_scale(style.DIVERGING),
        ),
    )


def _run(run: ReportRun, max_layers: int, thumbs: dict[str, str]) -> dict[str, Any]:
    data: dict[str, Any] = dict(
        name=run.name, note=run.note, layers=[], training=_training(run), pictures=[]
    )
    table = run.table
    if table is None:
        return data
    chosen = spread_out(range(len(table.layers)), max_layers)
    layers = {short_name(table.layers[n], table.layers): table.layers[n] for n in chosen}
    groups, names = class_groups(table)
    pictures = Thumbnails(run.cfg, table, size=64)
    keys = [
        path or f'{table.info["split"]} {n}'
        for path, n in zip(table.paths, table.positions, strict=True)
    ]
    for number, key in enumerate(keys):
        if key not in thumbs:
            thumbs[key] = pictures.uri(number)
    numbers = {key: number for number, key in enumerate(thumbs)}
    data.update(
        layers=list(layers),
        task=table.info['task'],
        split=table.info['split'],
        checkpoint=table.info['checkpoint'],
        pictures=[numbers[key] for key in keys],
        of=table.info['pictures'],
        classes=table.classes,
        groups=groups.tolist(),
        group_names=list(names.items()),
        present=[[int(c) for c in np.flatnonzero(row)] for row in table.present],
        cost=_cost(table),
        embedding=_embeddings(table, layers),
        frequency={name: _frequency(table, layer) for name, layer in layers.items()},
        neighbors={name: _neighbors(table, layer) for name, layer in layers.items()},
    )
    return data


def _embeddings(table: GateTable, layers: dict[str, str]) -> dict[str, Any]:
    if len(table) < 4:
        return {}
    found = {}
    with progress('embeddings', len(layers)) as advance:
        for name, layer in layers.items():
            places = embed_table(table, layer)
            found[name] = {kind: np.round(xy, 2).tolist() for kind, xy in places.items()}
            advance()
    return found


def _frequency(table: GateTable, layer: str) -> dict[str, Any]:
    found = patterns(table, layer)
    return dict(
        open=_round(float(found.overall.mean())),
        classes=found.classes,
        channels=found.channels.tolist(),
        values=_grid(found.frequency),
        overall=_grid(found.overall[None])[0],
        similarity=_grid(found.similarity),
    )


def _neighbors(table: GateTable, layer: str) -> list[dict[str, Any]]:
    queries = default_queries(table, 4)
    found = zip(queries, galleries(table, layer, queries), strict=True)
    return [dict(query=q, hits=[[r['picture'], r['text']] for r in rows]) for q, rows in found]


def _cost(table: GateTable) -> dict[str, Any]:
    rows = cost_rows(table)
    executed = table.macs[:, 0] / 1e9
    task = task_named(table.info['task'])
    objects = None if task.one_class else table.objects.tolist()
    correlation = rank_correlation(table.objects, executed) if objects else float('nan')
    return dict(
        macs=[_round(float(value)) for value in executed],
        dense=_round(float(table.macs[:, 1].mean() / 1e9)),
        objects=objects,
        objects_name=task.objects_name,
        correlation=None if np.isnan(correlation) else _round(correlation),
        cheapest=[row['picture'] for row in rows[:EXTREMES]],
        dearest=[row['picture'] for row in rows[-EXTREMES:]],
    )


def _training(run: ReportRun) -> dict[str, Any]:
    return {
        title: [
            dict(
                name=curve_label(name, names),
                points=_thin(run.curves[name]),
                detail=is_detail(name),
            )
            for name in names
        ]
        for title, names in panels({run.name: run.curves}).items()
    }


def _thin(curve: Curve) -> list[list[Optional[float]]]:
    points = [curve[n] for n in spread_out(range(len(curve)), _POINTS)]
    return [[step, _round(value)] for step, value in points]


def _grid(values: np.ndarray) -> list[list[Optional[float]]]:
    return [[_round(float(value), 2) for value in row] for row in values]


def _round(value: float, digits: int = 4) -> Optional[float]:
    """To that many digits; None for what JSON has no number for."""
    if not np.isfinite(value):
        return None
    return float(f'{value:.{digits}g}') if digits > 2 else round(value, digits)
