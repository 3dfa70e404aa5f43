# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import json

import pytest
from mmengine.config import Config

from fgc_mm.analysis import Point, average, point_of, read_figures, task_metric, vary, write

FIGURES = {'accuracy/top1': 98.0, 'accuracy/top5': 100.0, 'macs/pruning_ratio': 40.0}


def test_a_point_of_the_figures_of_a_test():
    assert point_of(FIGURES, 'a', 0.5) == Point('a', 0.5, 0.6, 98.0)
    assert point_of(FIGURES, 'a', 0.5, 'accuracy/top5', seed=1).notes == dict(seed=1)
    with pytest.raises(ValueError, match=r"metric='mAP' is not among .*'accuracy/top1'"):
        task_metric(FIGURES, 'mAP')
    with pytest.raises(ValueError, match='no metric of a task'):
        task_metric({'macs/pruning_ratio': 1.0})


def test_runs_are_averaged_within_a_setting():
    points = [Point('a', 0.5, 0.4, 1.0), Point('a', 0.5, 0.6, 3.0), Point('b', 0.5, 0.5, 9.0)]
    (first, error), (second, none) = average(points)
    assert (first.share, first.metric) == (0.5, 2.0)
    assert error.metric == pytest.approx(1.0)  # standard deviation sqrt(2) over sqrt(2)
    assert second == points[2] and none is None


def test_table_and_plot_are_written(tmp_path):
    points = [Point('with FGC', t, t + 0.01, 90 + t) for t in (0.3, 0.5)]
    points += [Point('without FGC', 0.5, 0.49, 89.0), Point('without FGC', 0.5, 0.51, 91.0)]
    table = write(points, 'target', 'top1', tmp_path / 'new', 'curve')
    assert '| with FGC | 0.3 | 31.0 % | 90.3 | 1 |' in table
    assert '| without FGC | 0.5 | 50.0 +- 1.0 % | 90 +- 1 | 2 |' in table
    assert (tmp_path / 'new/curve.md').read_text() == table
    assert (tmp_path / 'new/curve.png').read_bytes().startswith(b'\x89PNG')
    assert len(json.loads((tmp_path / 'new/curve.json').read_text())['points']) == 4


def config():
    schedule = dict(start=0, end=6, value=0.5)
    hooks = [
        dict(type='L0Hook', rho=schedule),
        dict(type='FGCHook', k=3),
        dict(type='GatedMACsHook'),
    ]
    return Config(dict(custom_hooks=hooks, randomness=dict(seed=0)))


def test_variants_of_a_config():
    base = config()
    budget = vary(base, target=0.4, coupling=False, seed=7)
    assert budget.custom_hooks == [dict(type='BudgetHook', target=0.4), dict(type='GatedMACsHook')]
    assert budget.randomness.seed == 7
    back = vary(budget, rho=0.8)
    assert back.custom_hooks[0] == dict(type='L0Hook', rho=0.8)
    rho = vary(base, rho=0.8, coupling=True)
    assert rho.custom_hooks[0].rho == dict(start=0, end=6, value=0.8)
    assert rho.custom_hooks[1].type == 'FGCHook'
    assert base._cfg_dict == config()._cfg_dict
    with pytest.raises(ValueError, match='no FGCHook'):
        vary(budget, coupling=True)


def test_a_file_that_holds_no_figures(tmp_path):
    path = tmp_path / 'x.json'
    for text in ('{}', '[1]', 'nothing'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r'holds no figures of tools/test.py'):
            read_figures(path)
