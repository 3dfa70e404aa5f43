# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What tools/train.py says when the weights to start from are not there."""

import argparse
import re

import pytest
import torch
from mmengine.config import Config, DictAction
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope

from fgc_mm.engine.start_weights import check_start_weights

INIT = 'model.backbone.init_cfg.checkpoint'
CASES = {
    'resnet20_fgc_cifar10': ('load_from', 'resnet20_bas_cifar10'),
    'demo/pspnet_r18_digits_gated': ('load_from', 'demo/pspnet_r18_digits'),
    'resnet18_gated_imagenet': ('load_from', 'resnet18_bas_imagenet'),
    'faster_rcnn_r34_fgc_voc': (INIT, 'resnet34_fgc_imagenet'),
    'pspnet_r50_gated_cityscapes': (
        'model.backbone.init_cfg.checkpoint',
        'resnet50_gated_imagenet',
    ),
}


@pytest.mark.parametrize('name', CASES)
def test_one_message_with_the_config_that_makes_them(name, run_tool, tmp_path):
    key, maker = CASES[name]
    config = f'configs/{name}.py'
    nowhere = str(tmp_path / 'work_dirs' / maker.rpartition('/')[2] / 'epoch_9.pth')
    options = ['--cfg-options', f'{key}={nowhere}']
    code, _, err = run_tool('train', config, '--work-dir', tmp_path, *options)
    assert code == 2
    assert 'Traceback' not in err
    assert f'{key}={nowhere!r} does not exist' in err
    assert f'python tools/train.py configs/{maker}.py' in err
    assert '--cfg-options' in err
    # Public weights do not fit the demo's narrow network.
    assert ('://' in err) == (not name.startswith(('demo', 'resnet20')))


def advised(message):
    """The options a message advises, as a user would give them."""
    options = re.search(r'instead:  --cfg-options (.*)', message)[1].split()
    parser = argparse.ArgumentParser()
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    return parser.parse_args(['--cfg-options', *options]).cfg_options


@pytest.fixture
def from_dense(run_tool):
    """``from_dense(config name)``: its config with the options the error advises."""

    def load(name):
        cfg = Config.fromfile(f'configs/{name}.py')
        key, _ = CASES[name]
        cfg.merge_from_dict({key: 'work_dirs/nowhere/epoch_1.pth'})
        with pytest.raises(FileNotFoundError) as caught:
            check_start_weights(cfg)
        cfg.merge_from_dict(advised(str(caught.value)))
        check_start_weights(cfg)
        return cfg

    return load


@pytest.mark.parametrize('name', ['faster_rcnn_r34_fgc_voc', 'pspnet_r50_gated_cityscapes'])
def test_the_advice_lets_gates_learn_from_dense_weights(name, from_dense):
    """Dense public weights, layer norm, and ten times the learning rate for the gates."""
    cfg = from_dense(name)
    depth = cfg.model.backbone.depth
    start = cfg.model.backbone.init_cfg
    assert (start.checkpoint, start.prefix) == (f'torchvision://resnet{depth}', None)
    init_default_scope(cfg.default_scope)
    narrow = dict(base_channels=8, stem_channels=8, init_cfg=None)
    model = torch.nn.ModuleDict({'backbone': MODELS.build({**cfg.model.backbone, **narrow})})
    gates = [m for m in model.modules() if type(m).__name__ == 'BinConcreteGate']
    assert gates and all(isinstance(gate.norm, torch.nn.LayerNorm) for gate in gates)
    optimizer = build_optim_wrapper(model, cfg.optim_wrapper).optimizer
    of = {id(p): group for group in optimizer.param_groups for p in group['params']}
    lr = cfg.optim_wrapper.optimizer.lr
    assert {of[id(p)]['lr'] for gate in gates for p in gate.parameters()} == {10 * lr}
    assert of[id(model.backbone.layer4[0].conv1.weight)]['lr'] == lr


def test_the_advice_for_a_classifier(from_dense):
    cfg = from_dense('resnet18_gated_imagenet')
    assert cfg.load_from is None
    assert cfg.model.backbone.init_cfg.to_dict() == dict(
        type='Pretrained', checkpoint='torchvision://resnet18'
    )


def test_files_and_addresses_pass(tmp_path):
    file = tmp_path / 'weights.pth'
    torch.save({}, file)
    init_cfg = [dict(type='Kaiming'), dict(type='Pretrained', checkpoint=str(file))]
    model = dict(backbone=dict(init_cfg=init_cfg), head=dict(pretrained='open-mmlab://vgg16'))
    check_start_weights(Config(dict(model=model, load_from='https://example.org/a.pth')))
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r'model\.backbone\.init_cfg\.1\.checkpoint='):
        check_start_weights(Config(dict(model=model)))
