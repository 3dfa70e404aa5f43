# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Points of a sweep, their configs, and table and figure from fake figures."""

import csv
import json
import re

import pytest
from gate_tables import assert_labeled
from hook_fields import set_fields
from mmengine.config import Config
from sweep_figures import collect, sweep_figure
from sweep_points import ABLATIONS, Point, curves, grid, make_runs

import fgc_mm  # noqa: F401
from fgc_mm.analysis import style
from fgc_mm.analysis.tradeoff import metric_unit, task_metric, tradeoff_figure, write_table

HOOKS = [
    dict(type='L0Hook', rho=dict(start=0, end=200, value=0.4)),
    dict(type='FGCHook', layers=[-2, -1], k=200),
    dict(type='GatedMACsHook'),
]


@pytest.fixture
def base(tmp_path):
    path = tmp_path / 'base.py'
    path.write_text(f'custom_hooks = {HOOKS!r}\nmodel = dict()\nother = 1\n')
    return path


def test_fields_are_set_by_type_and_the_rest_stays():
    changed = set_fields(HOOKS, {'FGCHook.k': 5, 'L0Hook.rho': 0.1, 'FGCHook.eta': 0})
    assert changed == [
        dict(type='L0Hook', rho=dict(start=0, end=200, value=0.1)),  # the ramp stays
        dict(type='FGCHook', layers=[-2, -1], k=5, eta=0),
        dict(type='GatedMACsHook'),
    ]
    assert HOOKS[1]['k'] == 200
    whole = set_fields(HOOKS, {'L0Hook.rho': dict(start=0, end=1, value=2)})
    assert whole[0]['rho'] == dict(start=0, end=1, value=2)
    scoped = set_fields([dict(type='fgc_mm.FGCHook')], {'FGCHook.shared': True})
    assert scoped == [dict(type='fgc_mm.FGCHook', shared=True)]


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'FGCHok.k': 1}, r'FGCHok\.k: .* must have one FGCHok, it has 0 .*L0Hook, FGCHook'),
        ({'FGCHook.kk': 1}, r"FGCHook has no field 'kk'; it has eta, k"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        set_fields(HOOKS, fields)
    with pytest.raises(ValueError, match='it has 2'):
        set_fields([*HOOKS, HOOKS[1]], {'FGCHook.k': 1})


def test_one_hook_decides_the_cost():
    budget = set_fields(HOOKS, {'BudgetHook.target': 0.4})
    assert budget == [dict(type='BudgetHook', target=0.4), *HOOKS[1:]]
    assert set_fields(budget, {'L0Hook.rho': 0.8})[0] == dict(type='L0Hook', rho=0.8)
    saving = [dict(type='BudgetHook', save=0.3)]
    assert set_fields(saving, {'BudgetHook.target': 0.4}) == [dict(type='BudgetHook', target=0.4)]
    with pytest.raises(ValueError, match='must have one BudgetHook, it has 0'):
        set_fields(HOOKS[1:], {'BudgetHook.target': 0.4})


def test_curves_with_and_without_coupling():
    points = curves('BudgetHook.target', [0.3, 0.5])
    assert [(point.label, point.series) for point in points] == [
        ('target=0.3', 'with FGC'),
        ('target=0.5', 'with FGC'),
        ('target=0.3, without FGC', 'without FGC'),
        ('target=0.5, without FGC', 'without FGC'),
    ]
    assert points[2].fields == {'BudgetHook.target': 0.3, 'FGCHook.eta': 0}
    # A config without coupling has one curve.
    assert curves('L0Hook.rho', [1.0], ways=()) == [Point('rho=1.0', {'L0Hook.rho': 1.0})]


def test_values_of_the_command_line():
    points = grid([['k', '5', '20'], ['FGCHook.layers', 'all', '[-2, -1]']], HOOKS)
    assert [point.fields for point in points] == [
        {'FGCHook.k': 5, 'FGCHook.layers': 'all'},
        {'FGCHook.k': 5, 'FGCHook.layers': [-2, -1]},
        {'FGCHook.k': 20, 'FGCHook.layers': 'all'},
        {'FGCHook.k': 20, 'FGCHook.layers': [-2, -1]},
    ]
    assert points[1].label == 'k=5, layers=[-2, -1]'
    with pytest.raises(ValueError, match='--set k has no values'):
        grid([['k']], HOOKS)
    with pytest.raises(ValueError, match=r'several hooks have it \(L0Hook, FGCHook\)'):
        grid([['log_interval', '1']], HOOKS)
    with pytest.raises(ValueError, match=r'no hook has it; .*GatedMACsHook'):
        grid([['kk', '1']], HOOKS)


def test_the_papers_ablations_fit_the_hooks():
    sizes = dict(k=8, eta=13, layers=6, source=5, shared=2, rho=12)
    assert {name: len(points) for name, points in ABLATIONS.items()} == sizes
    for points in ABLATIONS.values():
        assert len({point.label for point in points}) == len(points)
        for point in points:
            set_fields(HOOKS, point.fields)


def test_a_run_has_a_config_that_inherits_the_base(base, tmp_path):
    points = [Point('k=5', {'FGCHook.k': 5}), Point('a, b/c', {'L0Hook.rho': 0.1})]
    runs = make_runs(base, points, [0, 1], tmp_path / 'work', ['x=1'])
    assert [str(run.folder.relative_to(tmp_path / 'work')) for run in runs] == [
        'k=5/seed0',
        'k=5/seed1',
        'a_b_c/seed0',
        'a_b_c/seed1',
    ]
    run = runs[0]
    run.prepare()
    cfg = Config.fromfile(run.config)
    assert cfg.other == 1
    assert cfg.custom_hooks == [HOOKS[0], dict(HOOKS[1], k=5), HOOKS[2]]
    run.prepare()  # the same again is fine
    other = make_runs(base, points, [0], tmp_path / 'work', ['x=2'])
    with pytest.raises(ValueError, match='holds a run with other settings'):
        other[0].prepare()


def test_resuming_needs_a_checkpoint(base, tmp_path):
    (run,) = make_runs(base, [Point('k=5', {'FGCHook.k': 5})], [3], tmp_path / 'work', ['a=1'])
    assert '--resume' not in run.train_command()
    run.folder.mkdir(parents=True)
    (run.folder / 'last_checkpoint').write_text('elsewhere/epoch_2.pth')
    assert '--resume' not in run.train_command()  # it was removed
    (run.folder / 'epoch_2.pth').touch()
    train, test = run.train_command(), run.test_command()
    assert '--resume' in train
    assert train[-3:] == test[-3:] == ['--cfg-options', 'randomness.seed=3', 'a=1']
    assert test[3] == str(run.folder / 'epoch_2.pth')


@pytest.fixture
def done(base, tmp_path):
    """A sweep over rho whose last run is not done."""
    points = [p for p in ABLATIONS['rho'] if p.fields['L0Hook.rho'] in (0.1, 0.4)]
    runs = make_runs(base, points, [0, 1], tmp_path / 'work')
    for number, run in enumerate(runs[:-1]):
        run.folder.mkdir(parents=True)
        metrics = {
            'accuracy/top1': 0,
            'error/top1': 8.0 + number,
            'macs/pruning_ratio': 50 + number,
        }
        run.figures.write_text(json.dumps(dict(metrics=metrics)))
    return runs


def test_table(done, tmp_path):
    metric, rows = collect(done)
    assert metric == 'error/top1'
    assert [row.metric for row in rows] == [[8, 9], [10, 11], [12, 13], [14]]
    text = write_table(rows, metric, tmp_path)
    assert '| rho=0.1 | 2 | 8.5 ± 0.71 | 50.5 ± 0.71 |' in text
    assert '| rho=0.4, without FGC | 1 | 14 | 56 |' in text
    assert (tmp_path / 'table.md').read_text() == text
    with open(tmp_path / 'table.csv') as file:
        first, *_, last = csv.DictReader(file)
    assert first['error/top1_mean'] == '8.5' and first['error/top1_std'] == '0.707107'
    assert last['runs'] == '1' and last['macs/pruning_ratio_std'] == ''


def test_another_metric_and_none(done, base, tmp_path):
    assert collect(done, 'accuracy/top1')[1][0].metric == [0, 0]
    with pytest.raises(ValueError, match="'mIoU' is not among accuracy/top1, error/top1"):
        collect(done, 'mIoU')
    empty = make_runs(base, [Point('k=5', {'FGCHook.k': 5})], [0], tmp_path / 'empty')
    with pytest.raises(ValueError, match=re.escape('no run has its figures.json yet')):
        collect(empty)
    assert task_metric([{'macs/pruning_ratio': 1.0, 'panoptic/PQ': 2.0}]) == 'panoptic/PQ'


def test_what_figures_are_counted_in():
    units = {
        '%': 'accuracy/top1 error/top5 cow/accuracy/top1 mIoU val/aAcc pixel_accuracy '
        'macs/pruning_ratio',
        '0 to 1': 'pascal_voc/mAP pascal_voc/AP50 coco/bbox_mAP coco/bbox_mAP_50 gates/dynamic',
        '10⁹': 'macs/backbone_executed_G macs/model_dense_G',
        '': 'panoptic/PQ time loss',
    }
    for unit, names in units.items():
        assert {name: metric_unit(name) for name in names.split()} == dict.fromkeys(
            names.split(), unit
        )


def test_figure(done, tmp_path):
    metric, rows = collect(done)
    figure = sweep_figure(rows, metric)
    upper, lower = figure.axes
    # The two series share the places of their settings.
    assert [label.get_text() for label in lower.get_xticklabels()] == ['rho=0.1', 'rho=0.4']
    assert [text.get_text() for text in upper.get_legend().get_texts()] == [
        'with FGC',
        'without FGC',
    ]
    assert upper.get_ylabel() == 'error/top1, %' and lower.get_ylabel().endswith(', %')
    means = [container.lines[0].get_ydata().tolist() for container in upper.containers]
    assert means == [[8.5, 10.5], [12.5, 14]]
    saved = [container.lines[0].get_ydata().tolist() for container in lower.containers]
    assert saved == [[50.5, 52.5], [54.5, 56]]
    assert [container.lines[0].get_color() for container in upper.containers] == [*style.RUNS[:2]]
    assert_labeled(figure, 2)
    paths = style.save(figure, tmp_path / 'sweep')
    assert [path.name for path in paths] == ['sweep.png', 'sweep.svg']
    assert all(path.stat().st_size > 5000 for path in paths)


def test_figure_of_a_tradeoff(done, tmp_path):
    metric, rows = collect(done)
    figure = tradeoff_figure(rows, metric)
    (axes,) = figure.axes
    assert_labeled(figure, 1)
    assert axes.get_ylabel() == 'error/top1, %'
    looks = [(line.get_color(), line.get_marker()) for line in axes.lines]
    assert looks == list(zip(style.RUNS, style.MARKERS, strict=False))[:2]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        'with FGC',
        'without FGC',
    ]
    lines = [line.get_xydata().tolist() for line in axes.lines]
    # From the cheapest network on: executed share and metric, means over the seeds.
    assert lines == [[[47.5, 10.5], [49.5, 8.5]], [[44, 14], [45.5, 12.5]]]
