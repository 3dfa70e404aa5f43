# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Tables against an independent computation, and figures with labeled axes."""

import itertools
import sys

import numpy as np
import pytest
from gate_tables import LAYERS, Pictures, assert_inside, assert_labeled, make_table
from mmengine.config import Config
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from sklearn.neighbors import NearestNeighbors

from fgc_mm.analysis import alignment, cost, embedding, frequency, neighbors, style
from fgc_mm.analysis.gate_table import GateTable, short_name
from fgc_mm.analysis.gather import _check_finite
from fgc_mm.analysis.selection import find_picture
from fgc_mm.analysis.tables import read_csv
from fgc_mm.analysis.thumbnails import Thumbnails
from fgc_mm.errors import UsageError


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_a_table_comes_back_from_disk(tmp_path):
    table = make_table(11, 'segmentation')
    table.save(tmp_path / 'sub' / 'gates.npz')
    found = GateTable.load(tmp_path / 'sub' / 'gates.npz')
    assert found.layers == list(LAYERS) and found.info == table.info
    assert found.classes == table.classes and found.costs == table.costs
    for layer in LAYERS:
        for kind in ('logits', 'mask', 'feature'):
            np.testing.assert_array_equal(getattr(found, kind)[layer], getattr(table, kind)[layer])
    np.testing.assert_array_equal(found.macs, table.macs)


def test_the_main_class_is_not_the_background():
    table = make_table(12, 'segmentation')
    assert table.main_class.tolist() == [1, 2, 3] * 4
    table.amount[3, 1:] = 0
    assert table.main_class[3] == 0  # nothing else is there
    table.amount[3] = 0
    assert table.main_class[3] == -1 and table.class_name(-1) == 'none'


def test_pictures_of_one_class_have_it():
    table = make_table(12, 'classification')
    table.amount[:] = 0
    table.amount[:, 2] = 1
    assert (table.main_class == 2).all()


@pytest.mark.parametrize(
    'wanted, expected',
    [(-1, [2]), ('layer1', [0, 1]), (['layer1.1', 2], [1, 2]), ('backbone.layer1.0.gate1', [0])],
)
def test_choosing_layers(wanted, expected):
    assert make_table(6).choose(wanted) == [LAYERS[n] for n in expected]


def test_an_unknown_layer_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'layer9' names no block; choose from .*'layer2.0'"):
        make_table(6).choose('layer9')


def test_short_names():
    assert [short_name(n, LAYERS) for n in LAYERS] == ['layer1.0', 'layer1.1', 'layer2.0']
    both = ['backbone.layer1.0.gate1', 'backbone.layer1.0.gate2']
    assert short_name(both[1], both) == 'layer1.0.gate2'


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


def test_a_query_by_number_and_by_file():
    table = make_table(6)
    assert find_picture(table, '4') == 4
    with pytest.raises(UsageError, match=r'--query a.jpg: name a picture by its number, 0 to 5'):
        find_picture(table, 'a.jpg')
    table.paths = [f'data/{name}/a.jpg' for name in 'xyzuvw']
    assert find_picture(table, 'z/a.jpg') == 2 and find_picture(table, 'data/w/a.jpg') == 5
    with pytest.raises(UsageError, match=r'or by its file \(6 have this one\)'):
        find_picture(table, 'a.jpg')


@pytest.mark.parametrize('name', ['0', 'background', 'potted plant on a table'])
@pytest.mark.parametrize('classes', [3, 20])
def test_names_of_classes_have_room(name, classes):
    table = make_table(60)
    table.classes = [f'{name} {n}' for n in range(classes)]
    table.amount = np.eye(classes, dtype=np.float32)[np.arange(60) % classes]
    assert_labeled(frequency.frequency_figure(table, LAYERS[-1]), 2)


@pytest.mark.parametrize('space', ['logits', 'mask'])
def test_neighbors_against_scikit_learn(space, tmp_path):
    table = make_table()
    layer = LAYERS[-1]
    values = table.gates(layer, space).astype(np.float64)
    search = NearestNeighbors(n_neighbors=len(table), metric='cosine').fit(values)
    distance, _ = search.kneighbors(values[[5]])
    found = neighbors.ranking(table, layer, 5, space)
    assert [row['rank'] for row in found] == list(range(1, len(table)))
    assert all(row['picture'] != 5 for row in found)
    expected = 1 - distance[0][1:]
    np.testing.assert_allclose([row['similarity'] for row in found], expected, atol=1e-6)
    neighbors.analyze_neighbors(table, LAYERS[1:], Pictures(), tmp_path, [5, 0], space)
    rows = read_csv(tmp_path / 'neighbors.csv')
    assert [row['layer'] for row in rows[:: len(table) - 1]] == [*LAYERS[1:2] * 2, layer, layer]
    assert len(rows) == 2 * 2 * (len(table) - 1)
    for name in ('layer1.1', 'layer2.0'):  # each has its gallery
        assert (tmp_path / f'neighbors_{name}.png').stat().st_size > 999
        assert (tmp_path / f'neighbors_{name}.svg').is_file()
    assert_inside(neighbors.neighbors_figure(table, layer, [5, 0], Pictures(), space=space))


def test_a_gallery_goes_from_the_nearest_to_the_last():
    rows = neighbors.ranking(make_table(30), LAYERS[0], 0)
    chosen = [row['rank'] for row in neighbors.gallery(rows, near=3, far=2)]
    assert chosen[:3] == [1, 2, 3] and chosen[-1] == 29 and len(chosen) == 5
    assert len(neighbors.gallery(rows[:4], near=3, far=2)) == 4


def test_similarities_have_the_decimals_that_tell_them_apart():
    assert neighbors.decimals([[0.9, 0.9, 0.1], [0.5]]) == 3
    assert neighbors.decimals([[0.9, 0.1], [0.99999, 0.9999, 0.9998]]) == 4
    assert neighbors.decimals([[1.0, 1.0]]) == 6  # not more, whatever they are


def test_a_query_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match='--query 40 must be 0 to 39'):
        neighbors.analyze_neighbors(make_table(), LAYERS[:1], Pictures(), tmp_path, [40])


def test_alignment_against_scikit_learn(tmp_path):
    table, layer, k = make_table(), LAYERS[-1], 4
    found = alignment.align(table, layer, k=k)
    parts = {
        kind: KMeans(3, n_init=10, random_state=0).fit_predict(unit(values))
        for kind, values in (('feature', table.feature[layer]), ('gate', table.logits[layer]))
    }
    labels = np.arange(len(table)) % 3
    nmi = normalized_mutual_info_score
    assert found['nmi_feature_gate'] == pytest.approx(nmi(parts['feature'], parts['gate']))
    assert found['nmi_feature_label'] == pytest.approx(nmi(parts['feature'], labels))
    assert found['nmi_gate_label'] == pytest.approx(nmi(parts['gate'], labels))
    near = []
    for values in (table.feature[layer], table.logits[layer]):
        closeness = unit(values) @ unit(values).T
        np.fill_diagonal(closeness, -2)
        near.append([set(row[:k]) for row in np.argsort(-closeness, axis=1)])
    shared = [len(a & b) for a, b in zip(*near, strict=True)]
    assert found['overlap'] == pytest.approx(np.mean(shared) / k)
    first = alignment.align(table, LAYERS[0], k=k)
    assert found['nmi_gate_label'] > first['nmi_gate_label'] + 0.3
    tables = {'gated': make_table(coupled=()), 'FGC': table}
    alignment.analyze_alignment(tables, tmp_path, k=k)
    rows = read_csv(tmp_path / 'alignment.csv')
    assert [(r['run'], r['coupled']) for r in rows[2::3]] == [('gated', 'False'), ('FGC', 'True')]
    figure = alignment.alignment_figure(alignment.alignment_rows(tables, k=k))
    assert_labeled(figure, 4)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ['gated', 'FGC', 'coupled layer']


@pytest.mark.parametrize('task, plots', [('classification', 1), ('segmentation', 2)])
def test_cost(task, plots, tmp_path):
    table = make_table(task=task)
    rows = cost.cost_rows(table)
    assert [row['executed_G'] for row in rows] == sorted(table.macs[:, 0] / 1e9)
    assert rows[0]['share'] == pytest.approx(table.macs[:, 0].min() / 2e9)
    cost.analyze_cost(table, Pictures(), tmp_path)
    assert len(read_csv(tmp_path / 'cost.csv')) == len(table)
    assert_labeled(cost.cost_figure(table, Pictures()), plots)
    assert cost.rank_correlation(np.arange(9), np.arange(9) ** 3) == pytest.approx(1)
    assert np.isnan(cost.rank_correlation(np.ones(9), np.arange(9)))


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


def test_a_network_that_diverged_is_named():
    table = make_table(12, 'classification')
    _check_finite(table, 'model.pth')
    table.logits[table.layers[1]][3] = np.nan
    with pytest.raises(UsageError, match=f'model.pth: gate {table.layers[1]} gives NaN or Inf'):
        _check_finite(table, 'model.pth')


def test_pictures_that_are_gone_are_gray(tmp_path):
    table = make_table(12, 'detection')
    table.paths[:] = [str(tmp_path / 'gone.jpg')] * len(table)
    cfg = Config.fromfile('configs/demo/faster_rcnn_r18_digits_gated.py')
    cfg.demo_data = None
    cfg.test_dataloader.dataset.data_root = str(tmp_path / 'nowhere')
    assert (Thumbnails(cfg, table).read(0) == 128).all()
