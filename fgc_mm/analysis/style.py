# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One look for all figures, and how they and their tables are written."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Optional

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from ..files import write_files

RUNS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
"""Colors of runs (Okabe and Ito), told apart with all kinds of color vision."""
CLASSES = (
    *('#332288', '#88CCEE', '#117733', '#DDCC77', '#CC6677'),
    *('#44AA99', '#882255', '#999933', '#AA4499', '#888888'),
)
"""Colors of classes (Tol's muted scheme); more classes take other markers as well."""
MARKERS = 'osD^vP*X'
SEQUENTIAL = 'cividis'
DIVERGING = 'PuOr'
OTHER = '#BBBBBB'
"""Of pictures with no class, or with one that has no color of its own."""

_STYLE: dict[Any, Any] = {
    'font.size': 9,
    'axes.titlesize': 10,
    'axes.labelsize': 9,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': False,
    'grid.alpha': 0.3,
    'legend.frameon': False,
    'legend.fontsize': 8,
    'xtick.labelsize': 8,
    'ytick.labelsize': 8,
    'svg.fonttype': 'none',
    'svg.hashsalt': 'fgc_mm',
}


@contextmanager
def figure(
    width: float, height: float, layout: Optional[Literal['constrained']] = 'constrained'
) -> Iterator[Figure]:
    """An empty figure of that many inches, in this style, to be drawn inside.

    Galleries have no layout: their many axes take long to arrange.
    """
    with matplotlib.rc_context(_STYLE):
        empty = Figure(figsize=(width, height), layout=layout)
        FigureCanvasAgg(empty)
        yield empty


def class_look(index: int) -> dict[str, Any]:
    """Color and marker of a class in a scatter plot; of -1 for none, -2 for all others."""
    if index < 0:
        return dict(color=OTHER, marker='X' if index == -1 else 'o')
    marker = MARKERS[index // len(CLASSES) % len(MARKERS)]
    return dict(color=CLASSES[index % len(CLASSES)], marker=marker)


def run_look(index: int) -> dict[str, Any]:
    """Color, marker and line of a run."""
    lines = ('-', '--', '-.', ':')
    return dict(
        color=RUNS[index % len(RUNS)],
        marker=MARKERS[index % len(MARKERS)],
        linestyle=lines[index // len(RUNS) % len(lines)],
    )


def heat_map(axes: Axes, values: np.ndarray, scale: str, low: float, **options: Any) -> AxesImage:
    """Values from ``low`` to 1 as colors; hatched where there is none, which no color could say.

    ``scale`` is :data:`SEQUENTIAL` or :data:`DIVERGING`, ``options`` are those of ``imshow``.
    """
    axes.patch.set(hatch='/////', edgecolor='0.6', facecolor='white')
    return axes.imshow(
        values, cmap=scale, vmin=low, vmax=1, interpolation='nearest', aspect='auto', **options
    )


def color_scale(name: str, steps: int = 16) -> list[str]:
    """A color map as a list of hex colors."""
    return [to_hex(color) for color in matplotlib.colormaps[name](np.linspace(0, 1, steps))]


def save(drawn: Figure, stem: Path) -> list[Path]:
    """Write a figure as ``.png`` and ``.svg``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f'{stem.name}.{kind}') for kind in ('png', 'svg')]
    with matplotlib.rc_context(_STYLE):
        drawn.savefig(paths[0], dpi=150)
        drawn.set_layout_engine('none')  # everything has its place now
        drawn.savefig(paths[1], metadata={'Date': None})
    return paths


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write the table behind a figure: rows with the keys of the first as header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    for row in rows:
        cells = {k: f'{v:.6g}' if isinstance(v, float) else v for k, v in row.items()}
        writer.writerow(cells)
    write_files({path: text.getvalue()})
    return path
