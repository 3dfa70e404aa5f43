# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Features and gates side by side in the plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from matplotlib.figure import Figure

from ..errors import UsageError
from . import style
from .gate_table import GateTable, short_name
from .optional_packages import need
from .progress import progress

KINDS = {'feature': 'features', 'gate': 'gates'}
Embedding = dict[str, np.ndarray]
"""``'feature'`` and ``'gate'`` -> N x 2."""
_COLORS = 2 * len(style.CLASSES)  # more cannot be told apart
_OTHER = -2


def embed(values: np.ndarray, init: Optional[np.ndarray] = None) -> np.ndarray:
    """UMAP of vectors into the plane, by cosine.

    Args:
        values (ndarray): N x C, at least 4 rows.
        init (ndarray, optional): N x 2, where to start from, as the embedding
            of an earlier epoch. Defaults to None.

    Returns:
        ndarray: N x 2, the mean in the origin.
    """
    umap = need('umap', 'an embedding')
    if len(values) < 4:
        raise UsageError(f'an embedding needs 4 pictures at least, not {len(values)}')
    start: Any = 'random' if len(values) < 20 else 'spectral'
    if init is not None:
        start = (init * (10 / max(1e-9, float(np.abs(init).max())))).astype(np.float32)
    reducer = umap.UMAP(
        n_neighbors=min(15, len(values) - 1), metric='cosine', random_state=0, n_jobs=1, init=start
    )
    # Rows without a direction, as those of dead features, get a faint one.
    values = values.astype(np.float32)
    noise = np.random.default_rng(0).normal(size=values.shape).astype(np.float32)
    places = reducer.fit_transform(values + 1e-6 * (float(np.abs(values).max()) or 1.0) * noise)
    return places - places.mean(axis=0)


def embed_table(
    table: GateTable, layer: str, space: str = 'logits', init: Optional[Embedding] = None
) -> Embedding:
    """Features and gates of one layer, each in a plane of its own."""
    values = {'feature': table.feature[layer], 'gate': table.gates(layer, space)}
    return {kind: embed(v, init[kind] if init else None) for kind, v in values.items()}


def embedding_figure(
    table: GateTable,
    layer: str,
    frames: Mapping[str, Embedding],
    color_by: Optional[str] = None,
) -> Figure:
    """Features above gates, a column for each frame; or side by side for one frame.

    Args:
        table (GateTable): The gates, of any of the frames.
        layer (str): Name of the gate.
        frames (Mapping[str, Embedding]): Title -> embedding, such as the epochs.
        color_by (str, optional): A class: pictures with and without it are
            told apart. Defaults to None: by main class.
    """
    groups, names = _groups(table, color_by)
    one = len(frames) == 1
    rows, columns = (1, 2) if one else (2, len(frames))
    with style.figure((4 if one else 2.6) * columns + 1.4, 3.6 * rows) as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        for number, (title, embedding) in enumerate(frames.items()):
            for row, kind in enumerate(KINDS):
                place = axes[0][row] if one else axes[row][number]
                for group, name in names.items():
                    points = embedding[kind][groups == group].T
                    look = style.class_look(group)
                    place.scatter(*points, s=8, alpha=0.8, linewidths=0, label=name, **look)
                place.set(xticks=[], yticks=[], xlabel='UMAP 1', ylabel='UMAP 2')
                place.set_title(KINDS[kind] if one else f'{KINDS[kind]}, {title}')
        handles, labels = axes[0][0].get_legend_handles_labels()
        title = color_by or 'class'
        figure.legend(handles, labels, loc='outside right center', title=title, markerscale=2)
        what = f', {next(iter(frames))}' if one else ''
        figure.suptitle(f'{short_name(layer, table.layers)}{what}, {len(table)} pictures')
    return figure


def class_groups(table: GateTable) -> tuple[np.ndarray, dict[int, str]]:
    """What pictures are colored by: their main class, where it is among the most common.

    Returns:
        tuple: The group of each picture, and the names of the groups there are: a number
        from 0 on for each class that has a color, -1 for pictures without a class and
        -2 for those of all other classes.
    """
    common = table.common_classes(_COLORS)
    places = {c: place for place, c in enumerate(common)} | {-1: -1}
    groups = np.array([places.get(int(c), _OTHER) for c in table.main_class])
    names = {places[c]: table.class_name(c) for c in (*common, -1)} | {_OTHER: 'other'}
    found = sorted({int(group) for group in groups}, key=lambda group: (group < 0, group))
    return groups, {group: names[group] for group in found}


def _groups(table: GateTable, color_by: Optional[str]) -> tuple[np.ndarray, dict[int, str]]:
    if color_by is None:
        return class_groups(table)
    if color_by not in table.classes:
        raise UsageError(f'--color-by {color_by}: the classes are {", ".join(table.classes)}')
    present = table.present[:, table.classes.index(color_by)]
    return present.astype(int), {0: 'not in the picture', 1: 'in the picture'}


def analyze_embedding(
    frames: Mapping[str, GateTable],
    layers: Sequence[str],
    out_dir: Path,
    space: str = 'logits',
    color_by: Optional[str] = None,
    chained: bool = True,
) -> list[Path]:
    """Write ``embedding.csv`` and a figure for each layer.

    Args:
        frames (Mapping[str, GateTable]): Title -> gates over the same pictures,
            in order of training; the last is the one that matters.
        layers (Sequence[str]): Gates.
        out_dir (Path): Where to.
        space (str): ``'logits'`` or ``'mask'`` of the gates. Defaults to 'logits'.
        color_by (str, optional): See :func:`embedding_figure`.
        chained (bool): Whether each frame starts where the one before ended, as
            epochs of one training do. Defaults to True.
    """
    table = list(frames.values())[-1]
    rows: list[dict[str, Any]] = []
    written: list[Path] = []
    _groups(table, color_by)  # says what is wrong before it takes time
    for title, own in frames.items():
        missing = [layer for layer in layers if layer not in own.layers]
        if missing or not np.array_equal(own.positions, table.positions):
            what = f'no layer {missing[0]}' if missing else 'other pictures'
            raise UsageError(f'{title} has {what}; only alike networks can stand side by side')
    with progress('embeddings', len(layers) * len(frames)) as advance:
        for layer in layers:
            done: dict[str, Embedding] = {}
            for title, own in frames.items():
                init = list(done.values())[-1] if done and chained else None
                done[title] = embed_table(own, layer, space, init)
                rows += _rows(own, layer, done[title], title)
                advance()
            figure = embedding_figure(table, layer, done, color_by)
            stem = f'embedding_{short_name(layer, table.layers)}'
            written += style.save(figure, out_dir / stem)
    return [style.write_csv(rows, out_dir / 'embedding.csv'), *written]


def _rows(table: GateTable, layer: str, embedding: Embedding, frame: str) -> list[dict[str, Any]]:
    """A row for each picture and space."""
    categories = table.categories
    return [
        dict(frame=frame, layer=layer, space=kind, picture=n, category=categories[n], x=x, y=y)
        for kind, places in embedding.items()
        for n, (x, y) in enumerate(places.astype(float))
    ]
