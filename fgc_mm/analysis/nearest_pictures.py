# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Pictures sorted by how alike their gates are to those of a query."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from matplotlib.figure import Figure

from ..errors import UsageError
from . import style
from .gate_table import GateTable, short_name
from .tables import write_csv
from .thumbnails import Thumbnails, show, spread_out


def similarities(gates: np.ndarray, query: int) -> np.ndarray:
    """Cosine of each row to the row of the query."""
    unit = gates.astype(np.float64)
    unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    return np.clip(unit @ unit[query], -1, 1)


def ranking(table: GateTable, layer: str, query: int, space: str = 'logits') -> list[dict]:
    """All pictures but the query, the most similar first.

    Returns:
        list[dict]: ``query``, ``rank``, ``picture`` (row), ``similarity``,
        ``category`` (main class) and ``path``.
    """
    values = similarities(table.gates(layer, space), query)
    order = [int(n) for n in np.argsort(-values, kind='stable') if n != query]
    main = table.main_class
    return [
        dict(
            query=query,
            rank=rank,
            picture=number,
            similarity=float(values[number]),
            category=table.class_name(int(main[number])),
            path=table.paths[number],
        )
        for rank, number in enumerate(order, 1)
    ]


def default_queries(table: GateTable, count: int = 5) -> list[int]:
    """The first picture of each of some classes."""
    main = table.main_class
    first = [int(np.flatnonzero(main == c)[0]) for c in np.unique(main)]
    return spread_out(first, count)


def neighbors_figure(
    table: GateTable, layer: str, queries: Sequence[int], pictures: Thumbnails, **options: Any
) -> Figure:
    """A row for each query: itself, then pictures from most to least similar."""
    space = options.pop('space', 'logits')
    rows = [gallery(ranking(table, layer, query, space), **options) for query in queries]
    columns = 1 + max(map(len, rows))
    digits = decimals([[row['similarity'] for row in found] for found in rows])
    main = table.main_class
    with style.style():
        height = 1.35 * len(rows) + 0.4
        figure = style.new_figure(1.05 * columns, height, layout=None)
        margins = dict(left=0.005, right=0.995, bottom=0.005, top=1 - 0.6 / height)
        axes = figure.subplots(
            len(rows), columns, squeeze=False, gridspec_kw=dict(wspace=0.08, hspace=0.35, **margins)
        )
        for line, query, found in zip(axes, queries, rows, strict=True):
            what = table.class_name(int(main[query]))
            show(line[0], pictures.read(query), f'query {query}\nclass {what}')
            for place, row in zip(line[1:], found, strict=False):
                title = f'cosine {row["similarity"]:.{digits}f}\nclass {row["category"]}'
                show(place, pictures.read(row['picture']), title)
            for place in line[1 + len(found) :]:
                place.set_axis_off()
        figure.suptitle(
            f'{short_name(layer, table.layers)}, cosine of gate {space}: a query, its nearest '
            'pictures, then ever less similar ones to the last of all',
            fontsize=9,
        )
    return figure


def gallery(rows: Sequence[dict], near: int = 5, far: int = 4) -> list[dict]:
    """The nearest of a ranking, and some evenly down to the last."""
    rest = range(near, len(rows))
    chosen = spread_out(rest, far + 1)[1:] if far and len(rest) > far else list(rest)[:far]
    return [*rows[:near], *(rows[number] for number in chosen)]


def decimals(rows: Sequence[Sequence[float]]) -> int:
    """As many, 3 to 6, as it takes to see that the last of each row is less than the first."""
    for digits in range(3, 6):
        if all(f'{row[0]:.{digits}f}' != f'{row[-1]:.{digits}f}' for row in rows if len(row) > 1):
            return digits
    return 6


def analyze_neighbors(
    table: GateTable,
    layers: Sequence[str],
    pictures: Thumbnails,
    out_dir: Path,
    queries: Optional[Sequence[int]] = None,
    space: str = 'logits',
) -> list[Path]:
    """Write ``neighbors.csv`` with whole rankings, and a gallery for each layer."""
    queries = default_queries(table) if queries is None else list(queries)
    for query in queries:
        if not 0 <= query < len(table):
            raise UsageError(f'--query {query} must be 0 to {len(table) - 1}, the pictures there')
    rows = [
        {'layer': layer, **row}
        for layer in layers
        for query in queries
        for row in ranking(table, layer, query, space)
    ]
    written = [write_csv(rows, out_dir / 'neighbors.csv')]
    for layer in layers:
        figure = neighbors_figure(table, layer, queries, pictures, space=space)
        stem = f'neighbors_{short_name(layer, table.layers)}'
        written += style.save(figure, out_dir / stem)
    return written
