# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Embeddings that keep neighbors, and their colors."""

import sys

import numpy as np
import pytest
from gate_tables import LAYERS, assert_labeled, make_table, read_csv
from sklearn.neighbors import NearestNeighbors

from fgc_mm.analysis import embedding, style
from fgc_mm.errors import UsageError


def test_embeddings_are_the_same_again_and_keep_neighbors(tmp_path):
    table, layer = make_table(60), LAYERS[-1]
    table.feature[layer][0] = 0  # a picture without any feature
    embedding.analyze_embedding({'epoch 1': table, 'epoch 2': table}, [layer], tmp_path)
    rows = read_csv(tmp_path / 'embedding.csv')
    assert len(rows) == 2 * 2 * 60 and (tmp_path / 'embedding_layer2.0.svg').is_file()
    chosen = [r for r in rows if r['frame'] == 'epoch 1' and r['space'] == 'gate']
    places = np.array([[float(r['x']), float(r['y'])] for r in chosen])
    np.testing.assert_allclose(embedding.embed(table.logits[layer]), places, rtol=1e-4, atol=1e-4)
    nearest = NearestNeighbors(n_neighbors=2).fit(places).kneighbors(places)[1][:, 1]
    labels = np.arange(60) % 3
    assert (labels[nearest] == labels).mean() > 0.8
    frames = {'epoch 1': dict(feature=places, gate=places)}
    assert_labeled(embedding.embedding_figure(table, layer, frames), 2)
    assert_labeled(
        embedding.embedding_figure(table, layer, {**frames, 'epoch 2': frames['epoch 1']}), 4
    )
    figure = embedding.embedding_figure(table, layer, frames, color_by='dog')
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ['not in the picture', 'in the picture']


def test_classes_beyond_the_colors_are_others():
    table = make_table(66, 'classification')
    table.classes = [str(c) for c in range(23)]
    labels = np.minimum(np.arange(66) % 25, 22)  # class 22 more often than all
    table.amount = np.eye(23, dtype=np.float32)[labels]
    table.amount[0] = 0
    groups, names = embedding.class_groups(table)
    assert len(names) == 22 and names[-2] == 'other' and names[-1] == 'none'
    assert groups[0] == -1 and names[groups[22]] == '22'
    for picture, c in enumerate(labels):
        assert names[groups[picture]] in (('other', str(c)) if picture else ('none',))
    looks = [tuple(style.class_look(group).values()) for group in names]
    assert len(set(looks)) == len(looks)


def test_embedding_says_what_is_wrong(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match='--color-by cow: the classes are cat, dog, car'):
        embedding.analyze_embedding({'x': make_table()}, [LAYERS[0]], tmp_path, color_by='cow')
    with pytest.raises(UsageError, match='needs 4 pictures at least, not 3'):
        embedding.embed(np.ones((3, 2)))
    monkeypatch.setitem(sys.modules, 'umap', None)  # as if it were not installed
    with pytest.raises(ImportError, match=r'package umap.*pip install .fgc-mm\[analysis\]'):
        embedding.embed(np.ones((9, 2)))
