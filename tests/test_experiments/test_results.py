# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The parts of experiments/results.py, on figures made up."""

import functools
import importlib
import json
from types import SimpleNamespace

import pytest
from gate_tables import LAYERS, assert_labeled, make_table
from mmengine.config import Config
from mmengine.config import utils as config_utils
from runs import Run


@pytest.fixture
def modules():
    names = ('results_rows', 'results_kept', 'results_table', 'results')
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope='module', autouse=True)
def read_metafiles_once():
    """mmengine reads all metafiles of a package for each base that is taken from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_utils, 'load', functools.cache(config_utils.load))
        yield


@pytest.fixture
def make_run(tmp_path):
    def make(label, seed, error, ratio, overlap=None, time=None, series=''):
        folder = tmp_path / label / f'seed{seed}'
        folder.mkdir(parents=True)
        run = Run(tmp_path / 'base.py', folder, tmp_path / label / 'config.py', tmp_path, seed)
        metrics = {'error/top1': error, 'accuracy/top1': 100 - error, 'macs/pruning_ratio': ratio}
        metrics.update({'gates/dynamic': 0.3} if overlap is not None else {})
        run.figures.write_text(json.dumps(dict(metrics=metrics)))
        gate = dict(nmi_feature_gate=0.5, nmi_feature_label=0.6, nmi_gate_label=0.4)
        gates = 0 if overlap is None else 2
        own = {f'gate{i}': dict(gate, overlap=overlap + 0.1 * i) for i in range(gates)}
        (folder / 'alignment.json').write_text(json.dumps(own))
        if time is not None:
            rows = [dict(kind=kind, time_ratio=time) for kind in ('static', 'sparse')]
            rows.append(dict(kind='slim', time_ratio=time - 0.1))
            (folder / 'speed.json').write_text(json.dumps(dict(rows=rows)))
        return Run(run.base, folder, run.config, tmp_path, seed, label=label, series=series)

    return make


@pytest.fixture
def outcome_of(modules, tmp_path):
    kept = modules.results_kept.Kept(tmp_path / 'kept', tmp_path)
    (tmp_path / 'base.py').write_text('model = dict()')

    def make(run):
        assert kept.begin(run)
        kept.keep('resnet20', run)
        return kept.read('resnet20', run)

    return make


def test_every_row_has_its_config(modules, tmp_path):
    """And its hooks have the fields that are set."""
    rows = modules.results_rows
    labels = set()
    for name, task in rows.TASKS.items():
        trials_of = modules.results.trials_of
        points = [trial for part in modules.results.PARTS for trial in trials_of(task, part)]
        runs = rows.runs_of(points, [1, 2], tmp_path / name)
        assert len({run.folder for run in runs}) == len(runs) == 2 * len(points)
        assert [run.seed for run in runs] == [1] * len(points) + [2] * len(points)
        labels |= {run.label for run in runs}
        start = Config.fromfile(task.path('baseline')).load_from
        for trial in points:
            assert Config.fromfile(trial.config).load_from == start
            assert trial.versus in {'', *(run.label for run in runs)}
    assert {way.label for way in rows.WAYS.values()} <= labels


def test_trials_differ(modules, tmp_path):
    """A setting that is taken for the config's own would be trained as another row, twice."""
    rows, results = modules.results_rows, modules.results
    for task in rows.TASKS.values():
        same = {'search, without FGC': 'gated, without FGC'}  # with other seeds
        for eta in task.etas.get('mean_log', ()):
            same[f'search, mean_log eta={eta}'] = f'FGC, eta={eta}'
        for form in ('mean_log', 'log_sum'):
            same[f'search, {form} eta={task.eta}'] = f'FGC, {form}'
        trained = {}
        for part in results.PARTS:
            for run in rows.runs_of(results.trials_of(task, part), [1], tmp_path):
                label = same.get(run.label, run.label)
                trained.setdefault(modules.results_kept.fingerprint(run), set()).add(label)
        assert [labels for labels in trained.values() if len(labels) > 1] == []


def test_weights_are_those_of_the_configs(modules):
    rows = modules.results_rows
    for task in rows.TASKS.values():
        hooks = Config.fromfile(task.path('fgc')).custom_hooks
        assert [h.eta.value for h in hooks if h.type == 'FGCHook'] == [task.eta]
        assert not task.etas or task.eta in task.etas['mean_log']


def test_rows_of_one_task_cost_the_same(modules):
    rows = modules.results_rows
    for task in rows.TASKS.values():
        hooks = [
            Config.fromfile(task.path(rows.WAYS[r].stage)).get('custom_hooks') or []
            for r in task.rows
        ]
        targets = {h.target for own in hooks for h in own if h.type == 'BudgetHook'}
        assert len(targets) == 1
        layers = [h.layers for own in hooks for h in own if h.type == 'FGCHook']
        assert all(own == task.layers for own in layers)


def test_table_has_what_is_done(modules, make_run, outcome_of):
    tables = modules.results_table
    task = modules.results_rows.TASKS['resnet20']
    gated = modules.results_rows.WAYS['gated'].label
    runs = [
        make_run('dense', 1, 8.0, 0.0),
        make_run(gated, 1, 10.0, 55.0, 0.1),
        make_run(gated, 2, 11.0, 54.0, 0.1),
        make_run('FGC', 2, 10.5, 55.0, 0.3, time=0.8),
        make_run('FGC', 3, 10.0, 55.0, 0.3),
    ]
    done = [tables.figures(outcome_of(run), task) for run in runs]
    text = tables.table(done, task, {'FGC': gated})
    lines = [line.strip('| ').split(' | ') for line in text.splitlines()]
    by_row = {line[0]: line[1:] for line in lines[2:]}
    assert list(by_row) == ['dense', gated, 'FGC']
    assert by_row['dense'][:2] == ['1', '8.00']
    assert by_row['dense'][2] == ''
    assert by_row[gated][5] == '0.150 ± 0.000'
    assert by_row[gated][:5] == ['1, 2', '10.50 ± 0.71', '', '54.5 ± 0.7', '30.0 ± 0.0']
    assert by_row['FGC'][2] == '-0.50'  # seed 2 alone has both
    assert by_row['FGC'][-2:] == ['0.80', '0.70']
    # What it is compared with may be in another table.
    text = tables.table(done[3:], task, {'FGC': gated}, done)
    assert text.splitlines()[-1].split(' | ')[3] == '-0.50'


def test_all_seeds_that_are_kept(modules, make_run, outcome_of, tmp_path):
    for seed in (1, 12):
        outcome_of(make_run('FGC', seed, 10.0, 55.0, 0.3))
    kept = modules.results_kept.Kept(tmp_path / 'kept', tmp_path)
    assert kept.seeds('resnet20') == {1, 12} and kept.seeds('resnet32') == set()


def test_plot_joins_costs(modules, make_run, outcome_of):
    runs = [
        make_run(f'{series} {saved}', 1, 8 + saved / 20, saved, 0.1, series=series)
        for series in ('without FGC', 'with FGC')
        for saved in (30, 50, 70)
    ]
    done = [(run, outcome_of(run)) for run in [*runs, make_run('dense', 1, 8, 0)]]
    rows = modules.results_table.tradeoff_rows(done, 'accuracy/top1')
    assert [row.series for row in rows] == ['without FGC'] * 3 + ['with FGC'] * 3
    figure = modules.results.tradeoff_figure(rows, 'accuracy/top1', 'resnet20')
    assert_labeled(figure, 1)
    xs = figure.axes[0].lines[0].get_xdata()
    assert list(xs) == [30, 50, 70]


def test_gates_are_looked_at_once(modules, make_run, outcome_of, monkeypatch):
    tables = modules.results_table
    run = make_run('FGC', 1, 10.0, 55.0)
    (run.folder / 'alignment.json').unlink()
    (run.folder / 'last_checkpoint').write_text('epoch_6.pth')
    (run.folder / 'epoch_6.pth').touch()
    (run.folder / 'config.py').write_text('model = dict()')
    asked = []

    def gather(cfg, checkpoint):
        asked.append(checkpoint)
        return make_table()

    monkeypatch.setattr(tables, 'gather', gather)
    task = modules.results_rows.Task('{}', 'error/top1', [-1], '', 5)
    tables.look(run, task)
    tables.look(run, task)
    assert asked == [str(run.folder / 'epoch_6.pth')]
    known = tables.figures(outcome_of(run), task)
    assert list(known['layers']) == [LAYERS[-1]]
    assert known['overlap'] == known['layers'][LAYERS[-1]]['overlap'] > 0.1
    # Of the three classes the last layer knows most.
    assert known['nmi_gate_label'] > 0.5


def test_limit_counts_what_is_made(modules, make_run, monkeypatch, tmp_path):
    made = []
    done = make_run('done', 1, 10.0, 55.0)
    runs = [Run(tmp_path, tmp_path / str(i), tmp_path, tmp_path, label=str(i)) for i in range(3)]
    monkeypatch.setattr(modules.results, 'finish', lambda name, run, kept: made.append(run.label))
    monkeypatch.setattr(modules.results, 'make_start', lambda task, folder: True)
    kept = modules.results_kept.Kept(tmp_path / 'kept', tmp_path)
    plan = {'resnet20': {'search': runs[:2], 'rows': [runs[2], done]}}
    assert modules.results.execute(plan, kept, limit=2, jobs=1) == 3
    assert made == ['0', '1', 'done']
