# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""NMI and neighbor overlap against scikit-learn's."""

import numpy as np
import pytest
from gate_tables import LAYERS, assert_labeled, make_table, read_csv
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score

from fgc_mm.analysis import alignment


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


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
