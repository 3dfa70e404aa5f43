# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""experiments/results.py as a whole, on trainings of no time: what is kept of them, and used."""

import dataclasses
import importlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from gate_tables import make_table

PROJECT = Path(__file__).parents[2]
TRAIN = """
import argparse, os, pathlib, time
parser = argparse.ArgumentParser()
parser.add_argument('config')
parser.add_argument('--work-dir', type=pathlib.Path)
parser.add_argument('--cfg-options', nargs='+')
parser.add_argument('--resume', action='store_true')
args = parser.parse_args()
(args.work_dir / 'begun').touch()
end = time.monotonic() + 60
while len([*args.work_dir.parents[1].glob('*/*/begun')]) < int(os.environ.get('TOGETHER', 1)):
    assert time.monotonic() < end, 'nothing else is trained at the same time'
    time.sleep(0.01)
(args.work_dir / 'config.py').write_text('model = dict()')
(args.work_dir / 'epoch_1.pth').touch()
(args.work_dir / 'last_checkpoint').write_text('epoch_1.pth')
log = args.work_dir / '20260101_235950' / '20260101_235950.log'
log.parent.mkdir()
log.write_text('2026/01/01 23:59:50 - begun\\n2026/01/02 00:01:00 - Epoch(train) [1]\\n')
with open(pathlib.Path(__file__).with_name('trained'), 'a') as file:
    print(args.work_dir.parent.name, args.work_dir.name, file=file)
"""
TEST = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
for name in ('config', 'checkpoint', '--work-dir', '--out'):
    parser.add_argument(name)
parser.add_argument('--cfg-options', nargs='+')
args = parser.parse_args()
seed = int(args.cfg_options[0].partition('=')[2])
metrics = {'error/top1': 10.0 + seed, 'accuracy/top1': 90.0 - seed, 'macs/pruning_ratio': 55.0}
pathlib.Path(args.out).write_text(json.dumps(dict(metrics=dict(metrics, names=['a', 'b']))))
"""


@pytest.fixture
def results(monkeypatch):
    """The program, which takes its arguments and gives the exit code or message."""
    monkeypatch.chdir(PROJECT)
    module = importlib.import_module('results')
    importlib.import_module('results_kept')._config.cache_clear()

    def run(*args):
        sys.modules['results_kept']._config.cache_clear()  # a process of its own has read nothing
        monkeypatch.setattr(sys, 'argv', ['results.py', *map(str, args)])
        try:
            module.main()
        except SystemExit as stop:
            return stop.code
        return 0

    return run


@pytest.fixture
def tiny(results, monkeypatch, tmp_path):
    """A task of five rows whose trainings and tests are made up."""
    rows, tables = sys.modules['results_rows'], sys.modules['results_table']
    for name, text in (('train', TRAIN), ('test', TEST)):
        (tmp_path / f'{name}.py').write_text(text)
    start = tmp_path / 'start.pth'
    torch.save(dict(state_dict=dict(weight=torch.ones(2)), meta=dict(time='now')), start)
    hooks = ["dict(type='BudgetHook', target=0.5)", "dict(type='FGCHook', eta=0.1)"]
    base = f'lr = 0.1\nload_from = {str(start)!r}\nmodel = dict(depth=20)\n'
    (tmp_path / 'base.py').write_text(base)
    for count, stage in enumerate(('baseline', 'gated', 'fgc')):
        text = f"_base_ = 'base.py'\ncustom_hooks = [{', '.join(hooks[:count])}]\n"
        (tmp_path / f'tiny_{stage}.py').write_text(text)
    task = rows.Task(str(tmp_path / 'tiny_{}'), 'error/top1', [-1], '', 5, targets=(0.3,))

    def gather(cfg, checkpoint):
        if 'dense' in checkpoint:
            raise tables.UsageError('dense')
        return make_table()

    monkeypatch.setattr(tables, 'gather', gather)
    monkeypatch.setattr(rows, 'TOOLS', tmp_path)
    monkeypatch.setattr(sys.modules['results'], 'TASKS', {'tiny': task})
    return tmp_path


def trained(folder):
    path = folder / 'trained'
    return path.read_text().splitlines() if path.is_file() else []


def options(folder, work='work'):
    return ['--seeds', 1, 2, '--work-dir', folder / work, '--keep', folder / 'kept']


def written(folder):
    return [(folder / name).read_text() for name in ('results.md', 'results.json')]


def test_outcomes_are_used_without_work_dir(results, tiny, capsys):
    assert results(*options(tiny)) == 0
    assert len(trained(tiny)) == 5 * 2
    files = sorted(path.name for path in (tiny / 'kept/tiny').iterdir())
    assert len(files) == 10 and 'FGC_mean_log_target=0.3_seed2.json' in files
    outcome = json.loads((tiny / 'kept/tiny/FGC_mean_log_seed2.json').read_text())
    assert outcome['metrics']['error/top1'] == 12 and 'names' not in outcome['metrics']
    assert outcome['train_seconds'] == 70
    assert outcome['config']['custom_hooks'][1] == dict(type='FGCHook', eta=0.1)
    folder = 'WORK_DIR/tiny/FGC_mean_log'
    cut = f'{folder}/config.py --work-dir {folder}/seed2 --cfg-options randomness.seed=2'
    assert outcome['train'].endswith(cut) and outcome['train'].startswith('python ')
    assert f'{folder}/seed2/epoch_1.pth' in outcome['test']
    assert outcome['machine']['threads'] > 0 and outcome['machine']['processor']
    assert outcome['speed'] is None

    before = written(tiny / 'work')
    assert 'FGC, mean_log | 1, 2 | 11.50 ± 0.71' in before[0]
    shutil.rmtree(tiny / 'work')
    for more in (['--report'], ['--limit', 3], ['--speed']):
        assert results(*options(tiny, 'elsewhere'), *more) == 0
        assert written(tiny / 'elsewhere') == before
        assert (tiny / 'elsewhere/tradeoff_tiny.png').is_file()
        shutil.rmtree(tiny / 'elsewhere')
    assert len(trained(tiny)) == 5 * 2
    capsys.readouterr()
    assert results(*options(tiny), '--dry-run') == 0
    assert capsys.readouterr().out.count(': done, ') == 10


def test_every_seed_of_the_search_is_shown(results, tiny, capsys):
    tasks = sys.modules['results'].TASKS
    tasks['tiny'] = dataclasses.replace(tasks['tiny'], etas={'mean_log': (0.2,)})
    for seed in (0, 5):
        assert results(*options(tiny), '--parts', 'search', '--search-seeds', seed) == 0
    assert '| search, without FGC | 0, 5 |' in written(tiny / 'work')[0]
    capsys.readouterr()
    assert results(*options(tiny), '--parts', 'search', '--report') == 0
    assert '| search, mean_log eta=0.2 | 0, 5 |' in capsys.readouterr().out


def test_threads_that_differ_are_noticed(results, tiny, capsys):
    args = [*options(tiny), '--parts', 'rows', '--rows', 'dense']
    assert results(*args) == 0
    assert 'round differently' not in capsys.readouterr().out
    path = tiny / 'kept/tiny/dense_seed1.json'
    outcome = json.loads(path.read_text())
    outcome['machine']['threads'] += 1
    path.write_text(json.dumps(outcome))
    assert results(*args, '--report') == 0
    assert 'threads, which round differently: see --jobs' in capsys.readouterr().out


def test_what_lies_in_work_dirs_is_kept(results, tiny, capsys):
    """Also of runs behind one that is still to be made; without it nothing is shown of them."""
    args = [*options(tiny), '--parts', 'rows']
    assert results(*args) == 0
    shutil.rmtree(tiny / 'kept')
    assert results(*args, '--report') == 0
    assert written(tiny / 'work') == ['', '{}\n']
    shutil.rmtree(tiny / 'work/tiny/dense')
    (tiny / 'work/tiny/FGC_mean_log/seed1/fingerprint.json').unlink()
    assert results(*args, '--limit', 0) == 0
    assert len(list((tiny / 'kept/tiny').iterdir())) == 4 and len(trained(tiny)) == 6
    assert 'FGC_mean_log/seed1 does not say what it was begun with' in capsys.readouterr().out


def test_several_at_a_time(results, tiny, monkeypatch, capsys):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setenv('TOGETHER', '2')  # the first one waits for the second one
    monkeypatch.setattr(os, 'cpu_count', lambda: 8)
    threads = torch.get_num_threads()
    try:
        assert results(*options(tiny), '--jobs', 4) == 0
        assert torch.get_num_threads() == int(os.environ['OMP_NUM_THREADS']) == 2
    finally:
        torch.set_num_threads(threads)
        os.environ.pop('OMP_NUM_THREADS')  # which was not set by monkeypatch
    several, names = written(tiny / 'work'), trained(tiny)
    assert len(names) == len(set(names)) == 10
    assert 'tiny: 10 of 10 finished' in capsys.readouterr().out
    shutil.rmtree(tiny / 'work')
    shutil.rmtree(tiny / 'kept')
    monkeypatch.delenv('TOGETHER')
    assert results(*options(tiny)) == 0
    assert written(tiny / 'work') == several
    assert results('--jobs', 0) == 2


def test_another_config_is_noticed(results, tiny, capsys):
    args = [*options(tiny), '--parts', 'rows', '--rows', 'dense', 'gated']
    assert results(*args) == 0
    base = tiny / 'base.py'
    base.write_text(base.read_text() + '# only words\n')
    assert results(*args) == 0 and len(trained(tiny)) == 4
    base.write_text(base.read_text().replace('depth=20', 'depth=32'))
    capsys.readouterr()
    assert results(*args, '--report') == 0
    out = capsys.readouterr().out.splitlines()
    path = tiny / 'kept/tiny/dense_seed1.json'
    assert f'not counted: {path} is of another config than tiny_baseline.py is now' in out
    assert len([line for line in out if line.startswith('not counted')]) == 4
    assert written(tiny / 'work') == ['', '{}\n']

    # Nor is what lies in the work dir; elsewhere they are trained again.
    assert results(*args) == '4 runs failed' and len(trained(tiny)) == 4
    assert 'dense/seed1 was begun with another config' in capsys.readouterr().out
    assert results(*options(tiny, 'elsewhere'), *args[-5:]) == 0 and len(trained(tiny)) == 8
    capsys.readouterr()
    assert results(*args, '--report') == 0
    out = capsys.readouterr().out
    assert 'not counted' not in out and '| dense | 1, 2 |' in out
    # Other hooks make another config.py, which the work dir refuses.
    gated = tiny / 'tiny_gated.py'
    gated.write_text(gated.read_text().replace('0.5', '0.4'))
    assert results(*args) == '2 runs failed'
    assert 'holds a run with other settings' in capsys.readouterr().out


def test_other_weights_to_start_from_are_noticed(results, tiny, capsys):
    args = [*options(tiny), '--parts', 'rows', '--rows']
    assert results(*args, 'dense') == 0
    assert 'different weights' not in capsys.readouterr().out
    torch.save(dict(state_dict=dict(weight=torch.zeros(2))), tiny / 'start.pth')
    assert results(*args, 'dense', 'gated') == 0
    assert 'tiny: runs have started from different weights' in capsys.readouterr().out


def test_options_do_not_touch_what_is_measured(results, tiny):
    args = ['--work-dir', tiny / 'work', '--rows', 'dense', '--parts', 'rows', '--seeds', 1]
    assert results(*args, '--cfg-options', 'model.depth=8') == 0
    assert (tiny / 'work/measured/tiny/dense_seed1.json').is_file()
    assert not (PROJECT / 'experiments/measured/tiny').exists()


@pytest.mark.parametrize(
    ('damage', 'reason'),
    [
        (lambda text: '', 'Expecting value'),
        (lambda text: text[:100], ''),
        (lambda text: '[]', ''),
        (lambda text: '{}', 'task is missing'),
        (lambda text: text.replace('"seed": 1', '"seed": 2'), 'seed is 2, not 1'),
        (lambda text: text.replace('55.0', '"55"'), "'55' is no number"),
        (lambda text: text.replace('error/top1', 'mIoU'), 'error/top1 is missing'),
    ],
)
def test_a_broken_file_is_named(damage, reason, results, tiny):
    args = [*options(tiny), '--parts', 'rows', '--rows', 'dense']
    assert results(*args) == 0
    path = tiny / 'kept/tiny/dense_seed1.json'
    path.write_text(damage(path.read_text()))
    for more in ([], ['--report'], ['--speed'], ['--dry-run']):
        message = results(*args, *more)
        assert message.startswith(f'error: {path} is no kept outcome of tiny: dense, seed 1')
        assert reason in message and '\n' not in message
    assert len(trained(tiny)) == 2


def test_times_stand_beside_the_rest(results, tiny, monkeypatch):
    args = [*options(tiny), '--parts', 'rows']
    assert results(*args) == 0

    def measure(command, check):
        rows = [dict(kind=kind, time_ratio=0.8, realized=None) for kind in ('static', 'sparse')]
        Path(command[-1]).write_text(json.dumps(dict(arguments={}, rows=rows)))
        measured.append(command[-3])

    measured = []
    monkeypatch.setattr(sys.modules['results'].subprocess, 'run', measure)
    for _ in range(2):
        assert results(*args, '--speed') == 0
    assert [Path(path).parts[-3:-1] for path in measured] == [
        ('gated_without_FGC', 'seed1'),
        ('FGC_mean_log', 'seed1'),
    ]
    shutil.rmtree(tiny / 'work')
    assert results(*args, '--report') == 0
    lines = written(tiny / 'work')[0].splitlines()
    assert [line.split(' | ')[-2] for line in lines if line.startswith('| FGC')] == ['0.80']


def test_a_real_training(results, monkeypatch, tmp_path, short_options, demo_checkpoint):
    path = [str(PROJECT), os.environ.get('PYTHONPATH', '')]
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join(path))
    demo_checkpoint('resnet18_digits_gated', tmp_path / 'start.pth')
    base = PROJECT / 'configs/demo/resnet18_digits_gated.py'
    text = f'_base_ = {str(base)!r}\nload_from = {str(tmp_path / "start.pth")!r}\n'
    for stage in ('baseline', 'gated'):
        (tmp_path / f'digits_{stage}.py').write_text(text)
    rows = sys.modules['results_rows']
    task = rows.Task(
        str(tmp_path / 'digits_{}'), 'error/top1', 'last_stage', '', 2, rows=('gated',)
    )
    monkeypatch.setattr(sys.modules['results'], 'TASKS', {'digits': task})
    args = ['--rows', 'gated', '--parts', 'rows', '--seeds', 5, '--keep', tmp_path / 'kept']
    args += short_options(base, 'test_evaluator.topk=1')
    assert results(*args, '--work-dir', tmp_path / 'work') == 0
    outcome = json.loads((tmp_path / 'kept/digits/gated_without_FGC_seed5.json').read_text())
    assert outcome['train'].startswith('python tools/train.py WORK_DIR/digits/gated_without_FGC/')
    assert 0 <= outcome['train_seconds'] < 300
    assert outcome['alignment'] and len(outcome['start']) == 16
    assert results(*args, '--work-dir', tmp_path / 'elsewhere') == 0
    assert written(tmp_path / 'elsewhere') == written(tmp_path / 'work')
    assert not (tmp_path / 'elsewhere/digits').exists()
