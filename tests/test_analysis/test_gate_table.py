# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A table of gates: on disk, its classes, its layers."""

import numpy as np
import pytest
from gate_tables import LAYERS, make_table

from fgc_mm.analysis.gate_table import GateTable, short_name
from fgc_mm.errors import UsageError


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
    [(-1, [2]), ('layer1', [0, 1]), (['layer1.1', 2], [1, 2]), ('backbone.layer1.0.conv1', [0])],
)
def test_choosing_layers(wanted, expected):
    assert make_table(6).choose(wanted) == [LAYERS[n] for n in expected]


def test_an_unknown_layer_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'layer9' names no block; choose from .*'layer2.0'"):
        make_table(6).choose('layer9')


def test_short_names():
    assert [short_name(n, LAYERS) for n in LAYERS] == ['layer1.0', 'layer1.1', 'layer2.0']
    both = ['backbone.gates.layer1-0-conv1', 'backbone.gates.layer1-0-conv2']
    assert short_name(both[1], both) == 'layer1.0.conv2'


def test_a_network_that_diverged_is_named():
    table = make_table(12, 'classification')
    table.check_finite('model.pth')
    table.logits[table.layers[1]][3] = np.nan
    with pytest.raises(UsageError, match=f'model.pth: gate {table.layers[1]} gives NaN or Inf'):
        table.check_finite('model.pth')
