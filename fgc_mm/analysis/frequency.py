# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How often each channel is executed, by layer and by class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..tasks import task_named
from . import style
from .gate_table import GateTable, short_name
from .tables import write_csv


def frequencies(table: GateTable, layer: str) -> np.ndarray:
    """K x C: share of the pictures with a class for which a channel is open.

    A picture counts for every class that is in it. NaN for a class that is in
    none.
    """
    present = table.present.astype(np.float64)
    with np.errstate(invalid='ignore', divide='ignore'):
        return (present.T @ table.mask[layer]) / present.sum(axis=0)[:, None]


def class_similarity(frequency: np.ndarray, overall: np.ndarray) -> np.ndarray:
    """K x K: how alike the patterns of two classes are, -1 to 1.

    The cosine between their deviations from the frequency over all pictures:
    channels that are always open, or never, say nothing. NaN for a class
    without pictures or without a pattern of its own.

    Args:
        frequency (ndarray): K x C, see :func:`frequencies`.
        overall (ndarray): C, over all pictures.
    """
    own = frequency - overall
    length = np.linalg.norm(own, axis=1)
    length = np.where(length > 1e-9, length, np.nan)
    unit = own / length[:, None]
    return np.clip(unit @ unit.T, -1, 1)


def frequency_rows(table: GateTable, layers: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each layer, channel and class, 'all' among the classes."""
    rows = []
    counts = table.present.sum(axis=0)
    for layer in layers:
        values = np.vstack([table.mask[layer].mean(axis=0), frequencies(table, layer)])
        for name, count, row in zip(
            ['all', *table.classes], [len(table), *counts], values, strict=True
        ):
            rows += [
                dict(layer=layer, category=name, pictures=int(count), channel=c, frequency=float(f))
                for c, f in enumerate(row)
            ]
    return rows


def frequency_figure(table: GateTable, layer: str) -> Figure:
    """Heat map of classes and channels, and of classes and classes; 40 classes at most.

    Hatched is where there is nothing to know: a class in no picture, or one without a
    pattern of its own.
    """
    chosen = table.common_classes()
    values = frequencies(table, layer)[chosen]
    overall = table.mask[layer].mean(axis=0)
    order = np.argsort(-overall, kind='stable')
    classes = [table.classes[c] for c in chosen]
    with style.style():
        # The names stand upright below the similarities.
        room = 0.2 + 0.075 * max(map(len, classes))
        figure = style.new_figure(10, max(3.0, 0.22 * len(classes) + 1.2) + room)
        left, right = figure.subplots(1, 2, width_ratios=[2.4, 1])
        image = style.heat_map(left, values[:, order], style.SEQUENTIAL, 0)
        left.set_xlabel('channel, most often open first')
        one_class = task_named(table.info.get('task')).one_class
        left.set_ylabel('class' if one_class else 'class in the picture')
        left.set_yticks(range(len(classes)), classes)
        left.set_title(f'{short_name(layer, table.layers)}: {100 * overall.mean():.3g} % open')
        figure.colorbar(image, ax=left, label='execution frequency', pad=0.01)
        similar = class_similarity(values, overall)
        image = style.heat_map(right, similar, style.DIVERGING, -1)
        right.set_box_aspect(1)
        right.set_xticks(range(len(classes)), classes, rotation=90)
        right.set_yticks(range(len(classes)), classes)
        right.set_xlabel('class (hatched: no pattern)' if np.isnan(similar).any() else 'class')
        right.set_ylabel('class')
        right.set_title('similarity of patterns')
        figure.colorbar(image, ax=right, label='cosine of deviations\nfrom the mean', pad=0.02)
    return figure


def layers_figure(table: GateTable) -> Figure:
    """Frequency of all channels, layer under layer."""
    layers = table.layers
    widest = max(table.mask[layer].shape[1] for layer in layers)
    values = np.full((len(layers), widest), np.nan)
    for row, layer in zip(values, layers, strict=True):
        # Stretched: a layer's channels fill the line, whatever their number.
        own = np.sort(table.mask[layer].mean(axis=0))[::-1]
        row[:] = own[np.arange(widest) * len(own) // widest]
    with style.style():
        figure = style.new_figure(7, max(2.4, 0.25 * len(layers) + 1.2))
        axes = figure.add_subplot()
        place = (0, 100, len(layers) - 0.5, -0.5)
        image = style.heat_map(axes, values, style.SEQUENTIAL, 0, extent=place)
        names = [f'{short_name(n, layers)} ({table.mask[n].shape[1]})' for n in layers]
        axes.set_yticks(range(len(layers)), names)
        axes.set_ylabel('layer (channels)')
        axes.set_xlabel('channels of the layer, most often open first, %')
        figure.colorbar(image, ax=axes, label='execution frequency', pad=0.01)
        axes.set_title(f'{len(table)} pictures')
    return figure


def analyze_frequency(table: GateTable, layers: Sequence[str], out_dir: Path) -> list[Path]:
    """Write ``frequency.csv``, ``similarity.csv``, and a figure of all layers and of each."""
    written = [write_csv(frequency_rows(table, table.layers), out_dir / 'frequency.csv')]
    pairs = []
    chosen = table.common_classes()
    for layer in table.layers:
        values = class_similarity(frequencies(table, layer), table.mask[layer].mean(axis=0))
        for a in chosen:
            pairs += [
                dict(
                    layer=layer,
                    category=table.classes[a],
                    other=table.classes[b],
                    similarity=float(values[a, b]),
                )
                for b in chosen
            ]
    written.append(write_csv(pairs, out_dir / 'similarity.csv'))
    written += style.save(layers_figure(table), out_dir / 'frequency')
    for layer in layers:
        name = f'frequency_{short_name(layer, table.layers)}'
        written += style.save(frequency_figure(table, layer), out_dir / name)
    return written
