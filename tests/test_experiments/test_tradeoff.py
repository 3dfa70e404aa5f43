# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The threshold options of tools/test.py, and experiments/tradeoff.py."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner

PROJECT = Path(__file__).parents[2]
CONFIG = 'configs/demo/resnet18_digits_gated.py'


@pytest.fixture
def trained(run_tool, short_options, tmp_path):
    options = short_options(CONFIG)
    assert run_tool('train', CONFIG, '--work-dir', tmp_path, *options)[0] == 0
    return tmp_path / 'epoch_1.pth'


def test_thresholds_and_budgets(trained, run_tool, short_options, tmp_path, monkeypatch):
    args = [CONFIG, trained, '--work-dir', tmp_path]
    options = short_options(CONFIG)
    code, out, err = run_tool('test', *args, '--threshold', 0.5, 0.88, 0.95, *options)
    assert code == 0, err
    points = json.loads((tmp_path / 'dial.json').read_text())['points']
    assert [p['threshold'] for p in points] == [0.5, 0.88, 0.95]
    saved = [p['metrics']['macs/pruning_ratio'] for p in points]
    assert saved[0] < saved[1] < saved[2]
    assert '| threshold=0.88 | 1 |' in out
    assert (tmp_path / 'dial.png').is_file() and (tmp_path / 'dial.svg').is_file()

    # Another metric that there is, and one that there is not: refused before a whole test.
    thresholds = ['--threshold', 0.5, 0.88]
    code, out, err = run_tool('test', *args, *thresholds, '--metric', 'accuracy/top5', *options)
    assert code == 0 and '| setting | runs | accuracy/top5 |' in out, err
    with monkeypatch.context() as patch:
        patch.setattr(Runner, 'test', None)
        code, _, err = run_tool('test', *args, *thresholds, '--metric', 'mIoU', *options)
    assert code == 2 and "--metric: metric 'mIoU' is not among accuracy/top1" in err
    code, _, err = run_tool('test', *args, '--threshold', 0.5, 0.88, 0.95, *options)
    assert code == 0, err

    figures = tmp_path / 'one.json'
    code, out, err = run_tool('test', *args, '--budget', 0.6, '--out', figures, *options)
    assert code == 0, err
    assert 'budget 0.6: threshold' in out
    written = json.loads(figures.read_text())
    assert f'threshold {written["threshold"]:.4g}' in out
    metrics = written['metrics']
    # Calibrated on the same four pictures.
    assert metrics['macs/pruning_ratio'] == pytest.approx(40, abs=1)

    code, _, err = run_tool('test', *args, '--budget', 0.01, *options)
    assert code == 2
    assert 'budget=0.01 is out of reach' in err

    collect = [f'one={figures}', f'dial={tmp_path / "dial.json"}']
    folder = tmp_path / 'curve'
    code, out, err = run_tool('tradeoff', '--collect', *collect, '--work-dir', folder)
    assert code == 0, err
    assert f'| one, {figures} |' in out
    dial = f'| dial, {tmp_path / "dial.json"}'
    for threshold in (0.5, 0.88, 0.95):  # each is told apart
        assert out.count(f'{dial}, threshold={threshold} |') == 1
    assert (folder / 'tradeoff.png').is_file() and (folder / 'tradeoff.svg').is_file()


def test_a_budget_between_two_steps_is_a_warning(trained, run_tool, short_options, tmp_path):
    checkpoint = torch.load(trained, weights_only=False)
    for name, tensor in checkpoint['state_dict'].items():
        if '.fc2.' in name:
            tensor.zero_()  # all channels close at once
    torch.save(checkpoint, tmp_path / 'coarse.pth')
    args = [CONFIG, tmp_path / 'coarse.pth', '--work-dir', tmp_path, '--budget', 0.6]
    code, out, err = run_tool('test', *args, *short_options(CONFIG))
    assert code == 0, err
    assert '--budget 0.6: many channels close at the same threshold' in out + err


def test_a_network_without_gates_has_no_dial(run_tool, short_options, tmp_path):
    config = 'configs/demo/resnet18_digits.py'
    options = short_options(config)
    assert run_tool('train', config, '--work-dir', tmp_path, *options)[0] == 0
    args = [config, tmp_path / 'epoch_1.pth', '--work-dir', tmp_path]
    code, _, err = run_tool('test', *args, '--threshold', 0.6, *options)
    assert code == 2
    assert 'has no gates' in err


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['--threshold', 1.0], '--threshold 1 must be within (0, 1)'),
        (['--budget', 0], '--budget 0 must be within (0, 1]'),
        (['--budget', 0.5, '--threshold', 0.5], 'give one of them'),
        (['--budget', 0.5, '--calibration-images', -1], '--calibration-images -1'),
        (['--threshold', 0.4, 0.5, '--out', 'x.pkl'], 'go to a .json file'),
        (
            ['--threshold', 0.4, '--metric', 'mIoU'],
            '--metric mIoU chooses what the plot of several',
        ),
    ],
)
def test_mistakes_of_the_dial_are_one_message(args, message, run_tool):
    code, _, err = run_tool('test', CONFIG, 'nowhere.pth', *args)
    assert code == 2
    assert message in err
    assert 'Traceback' not in err


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['--targets', 0.5], 'need a config'),
        ([CONFIG, '--targets', 1.5], '--targets 1.5 must be within (0, 1]'),
        ([CONFIG, '--targets', 0.5, '--coupling', 'with'], 'the config has no FGCHook'),
        (['--collect', 'nowhere.json'], '--collect nowhere.json: write CURVE=FILE'),
    ],
)
def test_mistakes_of_the_curve_are_one_message(args, message, run_tool, tmp_path):
    code, _, err = run_tool('tradeoff', *args, '--work-dir', tmp_path)
    assert code == 2
    assert message in err


def test_the_curve_of_a_config(run_tool, tmp_path):
    args = [CONFIG, '--targets', 0.9, '--seeds', 0, 1, '--work-dir', tmp_path, '--dry-run']
    code, out, err = run_tool('tradeoff', *args)
    assert code == 0, err
    assert out.count('train.py') == out.count('test.py') == 2
    assert '# target=0.9, seed 1' in out
    # What is there is not trained again.
    for run in ('target=0.3/seed0', 'target=0.9/seed0'):
        (tmp_path / run).mkdir(parents=True)
        metrics = {'accuracy/top1': 97.0, 'macs/pruning_ratio': 70.0}
        (tmp_path / run / 'figures.json').write_text(json.dumps(dict(metrics=metrics)))
    args = [CONFIG, '--targets', 0.3, 0.9, '--work-dir', tmp_path]
    code, out, err = run_tool('tradeoff', *args)
    assert code == 0, err
    assert '| target=0.9 | 1 | 97 | 70 |' in out
    assert (tmp_path / 'tradeoff.png').is_file()
    cfg = Config.fromfile(tmp_path / 'target=0.3/config.py')
    assert cfg.custom_hooks[0] == dict(type='BudgetHook', target=0.3)


def test_a_curve_for_real(run_tool, short_options, tmp_path, monkeypatch):
    """Two networks of two steps, with coupling and without, trained and tested."""
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(PROJECT), os.getenv('PYTHONPATH', '')]))
    config = tmp_path / 'resnet18_digits_coupled.py'
    hooks = [dict(type='FGCHook', layers=-1, k=2), dict(type='GatedMACsHook')]
    hooks = [dict(type='L0Hook', rho=0.4), *hooks]
    config.write_text(f"_base_ = '{PROJECT / CONFIG}'\ncustom_hooks = {hooks!r}\n")
    work = tmp_path / 'work'
    code, out, err = run_tool(
        'tradeoff', config, '--targets', 0.8, '--work-dir', work, *short_options(config)
    )
    assert code == 0, out + err
    with open(work / 'table.csv') as file:
        rows = list(csv.DictReader(file))
    assert [row['setting'] for row in rows] == ['target=0.8', 'target=0.8, without FGC']
    for row in rows:
        assert row['runs'] == '1' and 0 <= float(row['accuracy/top1_mean']) <= 100
        assert -1 < float(row['macs/pruning_ratio_mean']) < 100
        (folder,) = work.glob(f'{row["setting"].replace(", ", "_").replace(" ", "*")}/seed0')
        log = (folder / 'train.log').read_text()
        assert 'loss_budget' in log and 'loss_l0' not in log
        coupled = 'without' not in row['setting']
        assert bool(re.search(r'loss_fgc: (?!0\.0000)', log)) == coupled
    assert (work / 'tradeoff.png').is_file() and (work / 'tradeoff.svg').is_file()


@pytest.mark.parametrize('name', ['faster_rcnn_r18', 'pspnet_r18', 'resnet18'])
def test_the_budget_demos_train(name, run_tool, short_options, tmp_path):
    config = f'configs/demo/{name}_digits_budget.py'
    more = ['load_from=None', 'train_cfg.max_epochs=2', 'train_cfg.val_interval=1']
    options = short_options(config, *more)
    code, _, err = run_tool('train', config, '--work-dir', tmp_path, *options)
    assert code == 0, err
    state = torch.load(tmp_path / 'epoch_2.pth', weights_only=False)['budget']
    # Two steps, a validation at half of the training, where the target is reached, two steps.
    assert state['seen'] == 4 and state['validations'] == 1
    assert state['start'] > 0.6


@pytest.mark.parametrize(
    ('hooks', 'base', 'message'),
    [
        ("dict(type='BudgetHook', target=0.001)", CONFIG, 'target=0.001 cannot be reached'),
        ("dict(type='BudgetHook', target=1.5)", CONFIG, 'target=1.5 must be within (0, 1]'),
        ("dict(type='BudgetHook', target=0.5), dict(type='L0Hook')", CONFIG, 'keep one of them'),
        ("dict(type='BudgetHook', target=0.5)", 'configs/demo/resnet18_digits.py', 'has no gates'),
    ],
)
def test_a_budget_that_cannot_be_is_one_message(
    hooks, base, message, run_tool, short_options, tmp_path
):
    config = tmp_path / 'budget.py'
    config.write_text(f"_base_ = '{PROJECT / base}'\ncustom_hooks = [{hooks}]\n")
    options = short_options(base)
    code, _, err = run_tool('train', config, '--work-dir', tmp_path, *options)
    assert code == 2
    assert 'BudgetHook: ' in err and message in err
    assert 'Traceback' not in err
    assert not list(tmp_path.glob('*.pth'))
