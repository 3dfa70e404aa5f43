# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How often each channel is executed, by layer and by class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ..tasks import task_named
from . import style
from .gate_table import GateTable, short_name


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
    """
    own = frequency - overall
    length = np.linalg.norm(own, axis=1)
    length = np.where(length > 1e-9, length, np.nan)
    unit = own / length[:, None]
    return np.clip(unit @ unit.T, -1, 1)


class Patterns(NamedTuple):
    """What is shown of a layer: the most common classes, the channels open most often first."""

    classes: list[int]
    channels: np.ndarray
    overall: np.ndarray  # frequency over all pictures
    frequency: np.ndarray  # classes x channels
    similarity: np.ndarray  # classes x classes


def patterns(table: GateTable, layer: str) -> Patterns:
    """Frequencies and similarities, in the order in which they are shown."""
    classes = table.common_classes()
    overall = table.mask[layer].mean(axis=0)
    channels = np.argsort(-overall, kind='stable')
    frequency = frequencies(table, layer)[classes]
    similarity = class_similarity(frequency, overall)
    return Patterns(classes, channels, overall[channels], frequency[:, channels], similarity)


def frequency_figure(table: GateTable, layer: str) -> Figure:
    """Heat map of classes and channels, and of classes and classes; 40 classes at most.

    Hatched is where there is nothing to know: a class in no picture, or one without a
    pattern of its own.
    """
    found = patterns(table, layer)
    classes = [table.classes[c] for c in found.classes]
    # The names stand upright below the similarities.
    room = 0.2 + 0.075 * max(map(len, classes))
    with style.figure(10, max(3.0, 0.22 * len(classes) + 1.2) + room) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[2.4, 1])
        image = style.heat_map(left, found.frequency, style.SEQUENTIAL, 0)
        one_class = task_named(table.info.get('task')).one_class
        left.set_yticks(range(len(classes)), classes)
        left.set(
            xlabel='channel, most often open first',
            ylabel='class' if one_class else 'class in the picture',
            title=f'{short_name(layer, table.layers)}: {100 * found.overall.mean():.3g} % open',
        )
        figure.colorbar(image, ax=left, label='execution frequency', pad=0.01)
        image = style.heat_map(right, found.similarity, style.DIVERGING, -1)
        right.set_box_aspect(1)
        right.set_xticks(range(len(classes)), classes, rotation=90)
        right.set_yticks(range(len(classes)), classes)
        unknown = np.isnan(found.similarity).any()
        what = 'class (hatched: no pattern)' if unknown else 'class'
        right.set(xlabel=what, ylabel='class', title='similarity of patterns')
        figure.colorbar(image, ax=right, label='cosine of deviations\nfrom the mean', pad=0.02)
    return figure


def layers_figure(table: GateTable) -> Figure:
    """Frequency of all channels, layer under layer."""
    layers = table.layers
    counts = [table.mask[layer].shape[1] for layer in layers]
    rows = []
    for layer, count in zip(layers, counts, strict=True):
        # Stretched: a layer's channels fill the line, whatever their number.
        own = np.sort(table.mask[layer].mean(axis=0))[::-1]
        rows.append(own[np.arange(max(counts)) * count // max(counts)])
    with style.figure(7, max(2.4, 0.25 * len(layers) + 1.2)) as figure:
        axes = figure.add_subplot()
        place = (0, 100, len(layers) - 0.5, -0.5)
        image = style.heat_map(axes, np.array(rows), style.SEQUENTIAL, 0, extent=place)
        names = [f'{short_name(n, layers)} ({c})' for n, c in zip(layers, counts, strict=True)]
        axes.set_yticks(range(len(layers)), names)
        across = 'channels of the layer, most often open first, %'
        axes.set(xlabel=across, ylabel='layer (channels)', title=f'{len(table)} pictures')
        figure.colorbar(image, ax=axes, label='execution frequency', pad=0.01)
    return figure


def frequency_rows(table: GateTable) -> list[dict[str, Any]]:
    """A row for each layer, channel and class, 'all' among the classes."""
    counts = [len(table), *table.present.sum(axis=0)]
    return [
        dict(layer=layer, category=name, pictures=int(count), channel=c, frequency=float(value))
        for layer in table.layers
        for name, count, row in zip(
            ['all', *table.classes],
            counts,
            [table.mask[layer].mean(axis=0), *frequencies(table, layer)],
            strict=True,
        )
        for c, value in enumerate(row)
    ]


def similarity_rows(table: GateTable) -> list[dict[str, Any]]:
    """A row for each layer and two classes."""
    return [
        dict(
            layer=layer,
            category=table.classes[a],
            other=table.classes[b],
            similarity=float(found.similarity[i, j]),
        )
        for layer in table.layers
        for found in [patterns(table, layer)]
        for i, a in enumerate(found.classes)
        for j, b in enumerate(found.classes)
    ]


def analyze_frequency(table: GateTable, layers: Sequence[str], out_dir: Path) -> list[Path]:
    """Write ``frequency.csv``, ``similarity.csv``, and a figure of all layers and of each."""
    written = [
        style.write_csv(frequency_rows(table), out_dir / 'frequency.csv'),
        style.write_csv(similarity_rows(table), out_dir / 'similarity.csv'),
        *style.save(layers_figure(table), out_dir / 'frequency'),
    ]
    for layer in layers:
        name = f'frequency_{short_name(layer, table.layers)}'
        written += style.save(frequency_figure(table, layer), out_dir / name)
    return written
