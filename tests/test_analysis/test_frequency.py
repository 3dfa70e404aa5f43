# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Execution frequencies against counting, and labeled axes."""

import itertools

import numpy as np
import pytest
from gate_tables import LAYERS, assert_labeled, make_table, read_csv

from fgc_mm.analysis import frequency


@pytest.mark.parametrize('task', ['classification', 'segmentation'])
def test_frequencies_by_counting(task, tmp_path):
    table = make_table(task=task)
    table.amount[:, 1] = 0  # a class in no picture
    layer = LAYERS[1]
    found = frequency.frequencies(table, layer)
    for c, channel in itertools.product(range(len(table.classes)), range(6)):
        own = [table.mask[layer][i, channel] for i in range(len(table)) if table.amount[i, c] > 0]
        expected = sum(map(int, own)) / len(own) if own else np.nan
        np.testing.assert_allclose(found[c, channel], expected)
    overall = table.mask[layer].mean(axis=0)
    similar = frequency.class_similarity(found, overall)
    a, b = found[-1] - overall, found[0] - overall
    if task == 'classification':  # a background is in all pictures, and has no pattern of its own
        assert similar[-1, 0] == pytest.approx(a @ b / np.sqrt(a @ a * (b @ b)))
    assert np.isnan(similar[1]).all() and similar[-1, -1] == pytest.approx(1)
    written = frequency.analyze_frequency(table, [layer], tmp_path)
    names = {path.name for path in written}
    assert {'frequency.csv', 'similarity.csv', 'frequency_layer1.1.svg', 'frequency.png'} <= names
    rows = read_csv(tmp_path / 'frequency.csv')
    assert len(rows) == 3 * 6 * (1 + len(table.classes))
    row = next(r for r in rows if (r['layer'], r['category'], r['channel']) == (layer, 'car', '4'))
    assert float(row['frequency']) == pytest.approx(found[-1, 4], rel=1e-5)
    assert_labeled(frequency.frequency_figure(table, layer), 2)
    assert_labeled(frequency.layers_figure(table), 1)


def test_what_is_not_known_has_no_color():
    table = make_table()
    table.amount[:, 1] = 0  # a class in no picture
    figure = frequency.frequency_figure(table, LAYERS[1])
    for axes in figure.axes[:2]:
        (image,) = axes.images
        unknown = np.isnan(np.ma.filled(image.get_array(), np.nan))
        shown = image.to_rgba(image.get_array())[..., 3] > 0
        assert (shown == ~unknown).all() and unknown.any() and axes.patch.get_hatch()
    assert figure.axes[1].get_xlabel() == 'class (hatched: no pattern)'


@pytest.mark.parametrize('name', ['0', 'background', 'potted plant on a table'])
@pytest.mark.parametrize('classes', [3, 20])
def test_names_of_classes_have_room(name, classes):
    table = make_table(60)
    table.classes = [f'{name} {n}' for n in range(classes)]
    table.amount = np.eye(classes, dtype=np.float32)[np.arange(60) % classes]
    assert_labeled(frequency.frequency_figure(table, LAYERS[-1]), 2)
