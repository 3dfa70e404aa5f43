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
from .thumbnails import Thumbnails, show, spread_out


def ranking(
    table: GateTable, layer: str, query: int, space: str = 'logits'
) -> list[dict[str, Any]]:
    """All pictures but the query, the most similar first.

    Returns:
        list[dict]: ``query``, ``rank``, ``picture`` (row), ``similarity`` (cosine),
        ``category`` (main class) and ``path``.
    """
    unit = table.gates(layer, space).astype(np.float64)
    unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    values = np.clip(unit @ unit[query], -1, 1)
    order = [int(n) for n in np.argsort(-values, kind='stable') if n != query]
    categories = table.categories
    return [
        dict(
            query=query,
            rank=rank,
            picture=number,
            similarity=float(values[number]),
            category=categories[number],
            path=table.paths[number],
        )
        for rank, number in enumerate(order, 1)
    ]


def default_queries(table: GateTable, count: int = 5) -> list[int]:
    """The first picture of each of some classes."""
    _, first = np.unique(table.main_class, return_index=True)
    return spread_out(first, count)


def galleries(
    table: GateTable, layer: str, queries: Sequence[int], space: str = 'logits'
) -> list[list[dict[str, Any]]]:
    """What is shown of the rankings, each row with its similarity as ``text``."""
    found = [gallery(ranking(table, layer, query, space)) for query in queries]
    digits = decimals([[row['similarity'] for row in rows] for rows in found])
    return [[{**row, 'text': f'{row["similarity"]:.{digits}f}'} for row in rows] for rows in found]


def gallery(rows: Sequence[dict], near: int = 5, far: int = 4) -> list[dict]:
    """The nearest of a ranking, and some evenly down to the last."""
    rest = range(near, len(rows))
    chosen = spread_out(rest, far + 1)[1:] if len(rest) > far else list(rest)
    return [*rows[:near], *(rows[number] for number in chosen)]


def decimals(rows: Sequence[Sequence[float]]) -> int:
    """As many, 3 to 6, as it takes to see that the last of each row is less than the first."""
    for digits in range(3, 6):
        if all(f'{row[0]:.{digits}f}' != f'{row[-1]:.{digits}f}' for row in rows if len(row) > 1):
            return digits
    return 6


def neighbors_figure(
    table: GateTable,
    layer: str,
    queries: Sequence[int],
    pictures: Thumbnails,
    space: str = 'logits',
) -> Figure:
    """A row for each query: itself, then pictures from most to least similar."""
    rows = galleries(table, layer, queries, space)
    columns = 1 + max(map(len, rows))
    height = 1.35 * len(rows) + 0.4
    margins = dict(left=0.005, right=0.995, bottom=0.005, top=1 - 0.6 / height)
    with style.figure(1.05 * columns, height, layout=None) as figure:
        axes = figure.subplots(
            len(rows), columns, squeeze=False, gridspec_kw=dict(wspace=0.08, hspace=0.35, **margins)
        )
        for line, query, found in zip(axes, queries, rows, strict=True):
            show(line[0], pictures.read(query), f'query {query}\nclass {table.categories[query]}')
            for place, row in zip(line[1:], found, strict=False):
                title = f'cosine {row["text"]}\nclass {row["category"]}'
                show(place, pictures.read(row['picture']), title)
            for place in line[1 + len(found) :]:
                place.set_axis_off()
        figure.suptitle(
            f'{short_name(layer, table.layers)}, cosine of gate {space}: a query, its nearest '
            'pictures, then ever less similar ones to the last of all',
            fontsize=9,
        )
    return figure


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
    written = [style.write_csv(rows, out_dir / 'neighbors.csv')]
    for layer in layers:
        figure = neighbors_figure(table, layer, queries, pictures, space)
        stem = f'neighbors_{short_name(layer, table.layers)}'
        written += style.save(figure, out_dir / stem)
    return written
