# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The configs that users type, through the tools: 30 steps from dense weights, and a test.

Small pictures and a whole training of 30 steps, so that the budget is met within it.
"""

import json
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

CONFIGS = Path(__file__).parents[2] / 'configs'
NAMES = sorted(path.stem for path in CONFIGS.glob('*.py'))
STEPS = 30
pytestmark = pytest.mark.slow


@pytest.fixture
def tool(run_tool):
    def run(name, *args):
        code, out, err = run_tool(name, *args)
        assert code == 0, out[-3000:] + err[-3000:]
        return out + err

    return run


def dense_weights(name, cfg, place):
    """The dense network that a config starts from, with random weights, as a file."""
    init_default_scope(cfg.default_scope)
    dense = Config.fromfile(CONFIGS / f'{name.replace(stage(name), "baseline")}.py').model
    dense.backbone.init_cfg = None
    if cfg.load_from:
        weights, key = MODELS.build(dense).state_dict(), 'load_from'
    else:
        dense.backbone.norm_cfg = dict(type='BN')
        weights = MODELS.build(dense.backbone).state_dict()
        key = 'model.backbone.init_cfg.checkpoint'
    torch.save(weights, place)
    return f'{key}={place}'


def stage(name):
    return name.split('_')[-2]


def text(options):
    return [f'{key}={json.dumps(value)}' if isinstance(value, bool) else f'{key}={value}'
            for key, value in options.items()]  # fmt: skip


@pytest.mark.parametrize('name', NAMES)
def test_thirty_steps_and_a_test(name, small_options, tool, tmp_path):
    config = CONFIGS / f'{name}.py'
    cfg = Config.fromfile(config)
    options = small_options(cfg, tmp_path)
    for key in ('load_from', 'model.backbone.init_cfg', 'default_hooks.checkpoint', 'work_dir'):
        options.pop(key, None)
    options = {
        k: str(v).replace(' ', '') if isinstance(v, tuple) else v for k, v in options.items()
    }
    if 'max_iters' in cfg.train_cfg:
        options['train_cfg.max_iters'] = STEPS
        options['default_hooks.checkpoint.interval'] = STEPS
        last = f'iter_{STEPS}.pth'
    else:  # two steps each
        options['train_cfg.max_epochs'] = STEPS // 2
        options['default_hooks.checkpoint.interval'] = STEPS // 2
        last = f'epoch_{STEPS // 2}.pth'
    weights = dense_weights(name, cfg, tmp_path / 'dense.pth')
    options = ['--work-dir', tmp_path, '--cfg-options', *text(options), weights]
    said = tool('train', config, *options)
    out = tmp_path / 'figures.json'
    tool('test', config, tmp_path / last, '--out', out, *options)
    metrics = json.loads(out.read_text())['metrics']
    if stage(name) == 'baseline':
        assert metrics['macs/pruning_ratio'] == 0
        return
    assert 'gates are new, not in the checkpoint' in said
    (scalars,) = tmp_path.glob('*/vis_data/scalars.json')
    lines = [json.loads(line) for line in scalars.read_text().splitlines()]
    openness = [line['gate/openness'] for line in lines if 'gate/openness' in line]
    assert len(openness) == STEPS
    assert openness[-1] < openness[0] - 0.1
    assert metrics['macs/pruning_ratio'] > 10
    coupling = [line['loss_fgc'] for line in lines if 'loss_fgc' in line]
    assert bool(coupling) == (stage(name) == 'fgc')
    if coupling:  # from when the budget is met
        assert coupling[0] == 0 and coupling[-1] > 0
