# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A small table of gates, worked out by hand where it matters."""

import csv

import numpy as np

from fgc_mm.analysis.gate_table import GateTable

LAYERS = tuple(f'backbone.gates.{block}-conv1' for block in ('layer1-0', 'layer1-1', 'layer2-0'))


def make_table(n=40, task='classification', seed=0, coupled=(LAYERS[-1],)):
    """Three classes; the last layer's features and gates know them, the first's do not."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    amount = np.eye(3)[labels]
    if task == 'segmentation':  # a background everywhere, more of it than of anything else
        amount = np.hstack([np.full((n, 1), 5.0), amount + (rng.random((n, 3)) < 0.2) * 0.5])
    logits, feature, mask = {}, {}, {}
    for depth, layer in enumerate(LAYERS):
        centers = rng.normal(size=(3, 6)) * 3 * depth
        logits[layer] = (centers[labels] + rng.normal(size=(n, 6))).astype(np.float32)
        feature[layer] = np.abs(centers[labels] + rng.normal(size=(n, 6))).astype(np.float32)
        mask[layer] = (logits[layer] > 0).astype(np.uint8)
    dense = np.full(n, 2e9)
    executed = rng.uniform(0.5e9, 2e9, n)
    return GateTable(
        logits=logits,
        mask=mask,
        feature=feature,
        classes=(['ground'] if task == 'segmentation' else []) + ['cat', 'dog', 'car'],
        amount=amount.astype(np.float32),
        objects=(amount > 0).sum(axis=1),
        positions=np.arange(n),
        paths=[''] * n,
        macs=np.stack([executed, dense, executed, dense], axis=1),
        costs=[dict(layer='backbone.conv1', kind='plain', dense=1e6, executed=1e6)],
        info=dict(checkpoint='x.pth', split='test', task=task, pictures=n, coupled=list(coupled)),
    )


class Pictures:
    """In place of the pictures of a dataset."""

    def read(self, number):
        return np.full((8, 8, 3), number % 256, np.uint8)


def read_csv(path):
    """The rows of a file, all as text."""
    with open(path, newline='', encoding='utf-8') as file:
        return list(csv.DictReader(file))


def assert_labeled(figure, plots):
    """Every axes that shows data says on both axes what it shows."""
    figure.canvas.draw()
    shown = [axes for axes in figure.axes if axes.axison and axes.get_label() != '<colorbar>']
    assert len(shown) == plots
    for axes in shown:
        assert axes.get_xlabel() or axes.get_shared_x_axes().get_siblings(axes)[1:]
        assert axes.get_ylabel()
    assert any(axes.get_xlabel() for axes in shown)
    assert_inside(figure)


def assert_inside(figure):
    """Nothing that is drawn, labels above all, is cut off at the edge of the figure."""
    figure.canvas.draw()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) > -0.02, f'{box} of {width} x {height} inches'
    assert box.x1 < width + 0.02 and box.y1 < height + 0.02, f'{box} of {width} x {height} inches'
