# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Every command over a detector with gates in its heads."""

import csv
import json

import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.utils import import_modules_from_strings

from fgc_mm.gates import find_gates

CONFIG = """
_base_ = '{project}/configs/demo/faster_rcnn_r18_digits.py'
model = dict(
    _delete_=True, type='Gated', model=_base_.model, part={part!r}, example=(3, 64, 64))
custom_hooks = [
    dict(type='BudgetHook', target=0.5, backbone=''), dict(type='GatedMACsHook', backbone='')]
"""
HEADS = ('backbone', 'rpn_head', 'roi_head')


@pytest.fixture
def gated(run_tool, short_options, tmp_path):
    """``gated(part)``: a config with gates there, options, a checkpoint that opens some."""
    from command_line import PROJECT

    def make(part=HEADS):
        config, checkpoint = tmp_path / 'faster_rcnn_r18_digits_heads.py', tmp_path / 'start.pth'
        config.write_text(CONFIG.format(project=PROJECT, part=part))
        cfg = Config.fromfile(config)
        import_modules_from_strings('mmdet.models')
        torch.manual_seed(0)
        with DefaultScope.overwrite_default_scope('mmdet'):
            model = MODELS.build(cfg.model)
        model.init_weights()
        for gate in find_gates(model).values():
            nn.init.normal_(gate.fc2.weight, std=2)
            nn.init.zeros_(gate.fc2.bias)
            gate.fc2.weight.data[:2], gate.fc2.bias.data[:2] = 0, -9  # never open
        torch.save(dict(state_dict=model.state_dict(), meta=dict(epoch=1)), checkpoint)
        return config, checkpoint, short_options(config)

    return make


def figures(path):
    return json.loads(path.read_text())['metrics']


@pytest.mark.slow
def test_tests_pictures_and_smaller_networks(gated, run_tool, demo_root, tmp_path):
    config, checkpoint, options = gated()

    def run(command, *args):
        code, out, err = run_tool(command, config, checkpoint, *args, *options)
        assert code == 0, err
        return out

    run('test', '--work-dir', tmp_path, '--out', tmp_path / 'masked.json')
    run('test', '--work-dir', tmp_path, '--out', tmp_path / 'sparse.json', '--sparse')
    masked, sparse = figures(tmp_path / 'masked.json'), figures(tmp_path / 'sparse.json')
    for name, value in masked.items():
        if name.startswith('macs/'):
            assert sparse[name] == pytest.approx(value, rel=1e-3), name
    assert masked['macs/model_executed_G'] < 0.9 * masked['macs/model_dense_G']

    split = ['--calibration', 'test', '--calibration-images', 4]
    run('test', '--work-dir', tmp_path, '--budget', 0.7, *split, '--out', tmp_path / 'dial.json')
    assert 20 < figures(tmp_path / 'dial.json')['macs/pruning_ratio'] < 40  # of the whole model

    picture = min((demo_root / 'detection').rglob('*.jpg'))
    run('infer', picture, '--out-dir', tmp_path / 'infer')
    with (tmp_path / 'infer/macs.csv').open() as file:
        assert list(csv.DictReader(file))

    run('slim', '--out-dir', tmp_path / 'slim')
    (report,) = (tmp_path / 'slim').glob('*.json')
    (slim,) = (tmp_path / 'slim').glob('*.py')
    again = [slim, slim.with_name(f'{checkpoint.stem}_slim.pth'), '--work-dir', tmp_path]
    code, _, err = run_tool('test', *again, '--out', tmp_path / 'slim.json', *options)
    assert code == 0 and report.is_file(), err
    executed = figures(tmp_path / 'slim.json')['macs/model_executed_G']
    assert executed == pytest.approx(masked['macs/model_executed_G'], rel=0.01)


def test_figures_are_of_gates_that_decide_for_pictures(gated, run_tool, tmp_path):
    config, checkpoint, options = gated()
    args = [config, checkpoint, '--out-dir', tmp_path]
    code, _, err = run_tool('analyze', 'embedding', *args, *options)
    assert code == 0, err
    with (tmp_path / 'embedding.csv').open() as file:
        layers = {row['layer'] for row in csv.DictReader(file)}
    assert 'backbone.gates.layer4-1-conv1' in layers

    config, checkpoint, options = gated('rpn_head')
    args = [config, checkpoint, '--out-dir', tmp_path]
    code, _, err = run_tool('analyze', 'embedding', *args, '--no-cache', *options)
    assert code == 2 and 'cannot be chosen: gates there decide for each level or region' in err


def test_training_is_resumed(gated, run_tool, tmp_path):
    config, _, options = gated()
    args = [config, '--work-dir', tmp_path / 'work']
    assert run_tool('train', *args, *options)[0] == 0
    code, _, err = run_tool('train', *args, '--resume', *options, 'train_cfg.max_epochs=2')
    assert code == 0, err
    saved = torch.load(tmp_path / 'work/epoch_2.pth', weights_only=False)
    assert any(name.startswith('roi_head.gates.') for name in saved['state_dict'])
    assert saved['meta']['epoch'] == 2
