# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The threshold options of `fgc test`."""

import json

import pytest
import torch
from mmengine.runner import Runner

CONFIG = 'configs/demo/resnet18_digits_gated.py'


@pytest.fixture
def gated(run_tool, short_options, tmp_path):
    options = short_options(CONFIG)
    assert run_tool('train', CONFIG, '--work-dir', tmp_path, *options)[0] == 0
    return tmp_path / 'epoch_1.pth'


def test_thresholds_and_budgets(gated, run_tool, short_options, tmp_path, monkeypatch):
    args = [CONFIG, gated, '--work-dir', tmp_path]
    options = short_options(CONFIG)
    code, out, err = run_tool('test', *args, '--threshold', 0.5, 0.88, 0.95, *options)
    assert code == 0, err
    points = json.loads((tmp_path / 'dial.json').read_text())['points']
    assert [p['threshold'] for p in points] == [0.5, 0.88, 0.95]
    saved = [p['metrics']['macs/pruning_ratio'] for p in points]
    assert saved[0] < saved[1] < saved[2]
    assert '| threshold=0.88 | 1 |' in out
    assert (tmp_path / 'dial.png').is_file() and (tmp_path / 'dial.svg').is_file()

    # Another metric that there is, and one that there is not: refused after the first test.
    thresholds = ['--threshold', 0.5, 0.88]
    code, out, err = run_tool('test', *args, *thresholds, '--metric', 'accuracy/top5', *options)
    assert code == 0 and '| setting | runs | accuracy/top5 |' in out, err
    tests, test = [], Runner.test
    with monkeypatch.context() as patch:
        patch.setattr(Runner, 'test', lambda self: tests.append(self) or test(self))
        code, _, err = run_tool('test', *args, *thresholds, '--metric', 'mIoU', *options)
    assert code == 2 and "--metric: metric 'mIoU' is not among accuracy/top1" in err
    assert len(tests) == 1

    figures = tmp_path / 'one.json'
    code, out, err = run_tool('test', *args, '--budget', 0.6, '--out', figures, *options)
    assert code == 0, err
    assert 'budget 0.6: threshold' in out
    written = json.loads(figures.read_text())
    assert f'threshold {written["threshold"]:.4g}' in out
    metrics = written['metrics']
    # Calibrated on the same four pictures.
    assert metrics['macs/pruning_ratio'] == pytest.approx(40, abs=1)


def test_a_budget_between_two_steps_is_a_warning(gated, run_tool, short_options, tmp_path):
    checkpoint = torch.load(gated, weights_only=False)
    for name, tensor in checkpoint['state_dict'].items():
        if '.fc2.' in name:
            tensor.zero_()  # all channels close at once
    torch.save(checkpoint, tmp_path / 'coarse.pth')
    args = [CONFIG, tmp_path / 'coarse.pth', '--work-dir', tmp_path, '--budget', 0.6]
    code, out, err = run_tool('test', *args, *short_options(CONFIG))
    assert code == 0, err
    assert '--budget 0.6: many channels close at the same threshold' in out + err
