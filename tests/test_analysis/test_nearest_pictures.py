# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Neighbors against scikit-learn's, and the gallery of them."""

import numpy as np
import pytest
from gate_tables import LAYERS, Pictures, assert_inside, make_table, read_csv
from sklearn.neighbors import NearestNeighbors

from fgc_mm.analysis import nearest_pictures
from fgc_mm.errors import UsageError


@pytest.mark.parametrize('space', ['logits', 'mask'])
def test_neighbors_against_scikit_learn(space, tmp_path):
    table = make_table()
    layer = LAYERS[-1]
    values = table.gates(layer, space).astype(np.float64)
    search = NearestNeighbors(n_neighbors=len(table), metric='cosine').fit(values)
    distance, _ = search.kneighbors(values[[5]])
    found = nearest_pictures.ranking(table, layer, 5, space)
    assert [row['rank'] for row in found] == list(range(1, len(table)))
    assert all(row['picture'] != 5 for row in found)
    expected = 1 - distance[0][1:]
    np.testing.assert_allclose([row['similarity'] for row in found], expected, atol=1e-6)
    nearest_pictures.analyze_neighbors(table, LAYERS[1:], Pictures(), tmp_path, [5, 0], space)
    rows = read_csv(tmp_path / 'neighbors.csv')
    assert [row['layer'] for row in rows[:: len(table) - 1]] == [*LAYERS[1:2] * 2, layer, layer]
    assert len(rows) == 2 * 2 * (len(table) - 1)
    for name in ('layer1.1', 'layer2.0'):  # each has its gallery
        assert (tmp_path / f'neighbors_{name}.png').stat().st_size > 999
        assert (tmp_path / f'neighbors_{name}.svg').is_file()
    assert_inside(nearest_pictures.neighbors_figure(table, layer, [5, 0], Pictures(), space=space))


def test_a_gallery_goes_from_the_nearest_to_the_last():
    rows = nearest_pictures.ranking(make_table(30), LAYERS[0], 0)
    chosen = [row['rank'] for row in nearest_pictures.gallery(rows, near=3, far=2)]
    assert chosen[:3] == [1, 2, 3] and chosen[-1] == 29 and len(chosen) == 5
    assert len(nearest_pictures.gallery(rows[:4], near=3, far=2)) == 4


def test_similarities_have_the_decimals_that_tell_them_apart():
    assert nearest_pictures.decimals([[0.9, 0.9, 0.1], [0.5]]) == 3
    assert nearest_pictures.decimals([[0.9, 0.1], [0.99999, 0.9999, 0.9998]]) == 4
    assert nearest_pictures.decimals([[1.0, 1.0]]) == 6  # not more, whatever they are


def test_a_query_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match='--query 40 must be 0 to 39'):
        nearest_pictures.analyze_neighbors(make_table(), LAYERS[:1], Pictures(), tmp_path, [40])
