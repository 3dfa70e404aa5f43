# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Executed MACs by picture."""

import numpy as np
import pytest
from gate_tables import Pictures, assert_labeled, make_table, read_csv

from fgc_mm.analysis import cost


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
