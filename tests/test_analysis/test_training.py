# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import json

import pytest
from gate_tables import assert_labeled, read_csv

from fgc_mm.analysis import training
from fgc_mm.errors import UsageError

GATE = 'gate/openness/backbone.gates.layer1-0-conv1'


def write_log(folder, stamp, rows, end=''):
    path = folder / stamp / 'vis_data' / 'scalars.json'
    path.parent.mkdir(parents=True)
    path.write_text('\n'.join(map(json.dumps, rows)) + '\n' + end)


def step(number, **values):
    return dict(iter=number, step=number, epoch=1, time=0.1, **values)


@pytest.fixture
def work_dir(tmp_path):
    """A run that was stopped after 30 iterations and resumed from 20."""
    rows = [step(n, loss=float(n), loss_l0=0.5, **{'gate/openness': 0.9}) for n in (10, 20, 30)]
    rows.insert(2, {GATE: 0.7, 'step': 20})
    write_log(tmp_path, '20260101_000000', rows, end='{"loss": 3')
    later = [step(n, loss=100.0 + n, **{'fgc/overlap': 0.2}) for n in (30, 40)]
    write_log(
        tmp_path, '20260101_000001', [*later, {'mIoU': 51.0, 'macs/pruning_ratio': 3, 'step': 2}]
    )
    return tmp_path


def test_a_resumed_run_is_one_curve(work_dir):
    curves = training.read_curves(work_dir)
    assert curves['loss'] == [(10, 10.0), (20, 20.0), (30, 130.0), (40, 140.0)]
    assert curves['gate/openness'] == [(10, 0.9), (20, 0.9)]
    assert curves[GATE] == [(20, 0.7)] and 'mIoU' not in curves and 'time' not in curves
    assert training.last_validation(work_dir) == {'mIoU': 51.0, 'macs/pruning_ratio': 3}


def test_table_and_figure(work_dir, tmp_path):
    out = tmp_path / 'out'
    training.analyze_training({'a': work_dir, 'b': work_dir}, out)
    rows = read_csv(out / 'training.csv')
    assert {'run': 'b', 'name': 'loss', 'iteration': '40', 'value': '140'} in rows
    curves = training.read_curves(work_dir)
    one = training.training_figure({'a': curves})
    assert_labeled(one, 3)
    assert [axes.get_title() for axes in one.axes] == [
        'losses',
        'openness of the gates',
        'neighbor overlap',
    ]
    words = [text.get_text() for text in one.axes[1].get_legend().get_texts()]
    assert words == ['all gates', 'layer1.0']
    two = training.training_figure({'a': curves, 'b': curves})
    words = [text.get_text() for text in two.axes[1].get_legend().get_texts()]
    assert words == ['a', 'b']


def test_what_sums_up_a_panel_comes_first():
    names = ('loss_rpn', 'loss', 'loss_fgc', 'fgc/overlap/layer4.0', 'fgc/overlap')
    assert training.panels({'a': {name: [(1, 0.5)] for name in names}}) == {
        'losses': ['loss', 'loss_fgc', 'loss_rpn'],
        'neighbor overlap': ['fgc/overlap', 'fgc/overlap/layer4.0'],
    }


def test_folders_without_a_training(tmp_path):
    with pytest.raises(UsageError, match='missing does not exist'):
        training.read_curves(tmp_path / 'missing')
    with pytest.raises(UsageError, match='holds no log of a training'):
        training.read_curves(tmp_path)


def test_shares_and_the_weight_of_a_budget_are_not_one_scale(tmp_path):
    keys = ('goal', 'share', 'expected', 'weight')
    rows = [step(n, loss=1.0, **{f'budget/{key}': n / 20 for key in keys}) for n in (10, 20)]
    write_log(tmp_path, '20260101_000000', rows)
    curves = training.read_curves(tmp_path)
    once = {'loss': curves['loss'], 'budget/share': [(10, 0.5)]}
    figure = training.training_figure({'a': curves, 'b': once})
    assert_labeled(figure, 3)
    _, shares, weight = figure.axes
    assert shares.get_ylabel() == 'share of MACs executed'
    words = [text.get_text() for text in shares.get_legend().get_texts()]
    assert words == ['a: goal', 'a: share', 'a: expected', 'b: share']
    assert weight.get_ylabel() == 'weight of loss_budget'
    assert [text.get_text() for text in weight.get_legend().get_texts()] == ['a']
    # A curve of one point is a mark, not a line without length.
    *lines, single = shares.lines
    assert single.get_marker() == 'o' and all(line.get_marker() == 'None' for line in lines)
