# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Initialization, and weights from elsewhere: other packages, earlier versions, other networks."""

import logging
import re

import pytest
import torch
import torch.nn as nn
from gated_resnets import gated_resnet
from mmengine.logging import MMLogger
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_checkpoint, load_state_dict

from fgc_mm.gates import find_gates
from fgc_mm.nets.weights import watch_weights

SMALL = dict(base_channels=8, stem_channels=8)
FAMILIES = {
    'GatedResNetCifar': dict(depth=20, base_channels=8),
    'GatedWideResNet': dict(depth=10, widen_factor=1),
    'mmpretrain.GatedMobileNetV2': dict(widen_factor=0.25),
    'mmdet.GatedResNet': dict(depth=50, **SMALL),
}


@pytest.fixture
def messages():
    """What is logged while the test runs."""
    found = []

    class Keep(logging.Handler):
        def emit(self, record):
            found.append((record.levelname, record.getMessage()))

    logger, handler = MMLogger.get_current_instance(), Keep()
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def make(**kwargs):
    return gated_resnet(**{**SMALL, **kwargs})


def randomize(model):
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + (-0.5 if name.endswith('fc2.bias') else 0.5))
    return model


def dense_file(path, drop=()):
    """A checkpoint of a dense network with values of its own."""
    state = {
        name: value
        for name, value in randomize(make(gate=None)).state_dict().items()
        if not name.startswith(tuple(drop) or '-')
    }
    torch.save(dict(state_dict=state), path)
    return state


def assert_loaded(model, state):
    own = model.state_dict()
    for name, value in state.items():
        assert torch.equal(own[name], value), name


def assert_gates_fresh(model, bias=3.0):
    for gate in find_gates(model).values():
        assert (gate.fc2.bias == bias).all()
        assert gate.fc1.weight.std() > 0 and gate.fc2.weight.std() > 0


@pytest.mark.parametrize(
    'init_cfg',
    [
        None,
        [dict(type='TruncNormal', layer=['Linear'], std=0.02, bias=0.0)],
        dict(type='Normal', layer=['Linear', 'Conv2d'], std=0.01),
    ],
)
def test_gate_bias_survives_init_weights(init_cfg):
    model = make(init_cfg=init_cfg, gate=dict(type='BinConcreteGate', bias_init=2.5))
    model.init_weights()
    assert_gates_fresh(model, 2.5)


def test_torchvision_weights_through_init_cfg(tmp_path, messages):
    torchvision = pytest.importorskip('torchvision')
    theirs = torchvision.models.resnet18()
    torch.save(theirs.state_dict(), tmp_path / 'weights.pth')
    start = dict(type='Pretrained', checkpoint=str(tmp_path / 'weights.pth'))
    model = gated_resnet(18, init_cfg=start)
    model.init_weights()
    state = theirs.state_dict()
    assert_loaded(model, {name: value for name, value in state.items() if name[:3] != 'fc.'})
    assert_gates_fresh(model)
    keys = [n for n in model.state_dict() if n.startswith('gates.') and 'num_batches' not in n]
    told = f'ResNet: {len(keys)} keys of 8 gates are new, not in the checkpoint'
    assert ('INFO', told) in messages
    assert not any('missing' in text for _, text in messages)


def test_partial_weights_are_counted(tmp_path, messages):
    state = dense_file(tmp_path / 'partial.pth', drop=['layer4.1', 'layer3.0.bn1'])
    model = make(pretrained=str(tmp_path / 'partial.pth'))
    model.init_weights()
    assert_loaded(model, state)
    total = sum('num_batches' not in name for name in make(gate=None).state_dict())
    warnings = [text for level, text in messages if level == 'WARNING']
    # layer4.1: two convolutions and two norms of four values; layer3.0.bn1: four values.
    assert any(
        f'14 of {total} keys are missing' in text and 'layer4.1.conv1' in text for text in warnings
    )
    assert not any('gates.' in text for text in warnings)
    assert any('keys of 8 gates are new' in text for _, text in messages)


def test_weights_of_something_else_are_refused(tmp_path):
    torch.save({'encoder.weight': torch.zeros(1)}, tmp_path / 'other.pth')
    model = make(pretrained=str(tmp_path / 'other.pth'))
    with pytest.raises(ValueError, match=r"none of the network's 100 keys.*prefix"):
        model.init_weights()


def test_strict_loading_is_as_strict_as_ever(tmp_path):
    """Only init_weights forgives missing gates, resuming does not."""
    state = dense_file(tmp_path / 'dense.pth')
    with pytest.raises(RuntimeError, match=r'gates\.layer1-0-conv1\.fc1\.weight'):
        make().load_state_dict(state)


# -- earlier versions ------------------------------------------------------------------------


def old_name(name):
    """What an earlier version called a parameter: gates were children of their blocks."""
    match = re.fullmatch(r'gates\.(layer\d)-(\d+)-conv(?:(\d)|-0-conv)\.(.+)', name)
    return f'{match[1]}.{match[2]}.gate{match[3] or 1}.{match[4]}' if match else name


@pytest.mark.parametrize('way', ['strict', 'mmengine', 'in a model'])
@pytest.mark.parametrize('family', FAMILIES)
def test_checkpoints_of_the_old_names_load(family, way, tmp_path):
    torch.manual_seed(0)
    cfg = dict(type=family, **FAMILIES[family])
    state = randomize(MODELS.build(cfg)).state_dict()
    old = {old_name(name): value for name, value in state.items()}
    assert not any(name.startswith('gates.') for name in old)
    assert len(old) == len(state) and old.keys() != state.keys()
    model = MODELS.build(cfg)
    if way == 'strict':
        model.load_state_dict(old)
    elif way == 'mmengine':
        load_state_dict(model, old, strict=True)
    else:
        torch.save({f'backbone.{name}': value for name, value in old.items()}, tmp_path / 'a.pth')
        holder = nn.Module()
        holder.backbone = model
        load_checkpoint(holder, str(tmp_path / 'a.pth'), strict=True)
    assert_loaded(model, state)


def test_a_gate_of_old_that_has_no_place_is_told(messages):
    """A MobileNetV2's first block expands nothing: the stem makes what is gated there."""
    model = MODELS.build(dict(type='mmpretrain.GatedMobileNetV2', widen_factor=0.25))
    state = {old_name(name): value for name, value in randomize(model).state_dict().items()}
    state['layer1.0.gate1.fc1.weight'] = torch.zeros(16, 8)
    model.load_state_dict(state)
    told = [text for level, text in messages if level == 'WARNING']
    assert told == [
        'MobileNetV2: 1 gates of the checkpoint have no gate here, their channels stay open: '
        'layer1.0.gate1'
    ]


def test_old_gates_are_no_weights_of_another_network():
    state = {old_name(name): value for name, value in make().state_dict().items()}
    load_state_dict(make(gate=None), state)


# -- other packages --------------------------------------------------------------------------

PAIRS = [
    ('mmpretrain.ResNetV1d', 'mmseg.GatedResNetV1d', dict(depth=50, **SMALL)),
    ('mmseg.ResNetV1d', 'mmpretrain.GatedResNetV1d', dict(depth=50, **SMALL)),
    ('mmpretrain.ResNetV1d', 'mmdet.GatedResNetV1d', dict(depth=18, **SMALL)),
    ('mmpretrain.ResNetV1c', 'mmseg.GatedResNetV1c', dict(depth=18, **SMALL)),
    ('mmpretrain.MobileNetV2', 'mmdet.GatedMobileNetV2', dict(widen_factor=0.25)),
    ('mmdet.MobileNetV2', 'mmpretrain.GatedMobileNetV2', dict(widen_factor=0.25)),
]


@pytest.mark.parametrize('prefix', ['', 'backbone.'])
@pytest.mark.parametrize(('theirs', 'ours', 'options'), PAIRS, ids=str)
def test_other_packages_names_of_the_same_network(theirs, ours, options, prefix):
    torch.manual_seed(0)
    source = randomize(MODELS.build(dict(type=theirs, out_indices=(3,), **options)))
    model = MODELS.build(dict(type=ours, gate=None, out_indices=(3,), **options))
    holder = nn.Module()
    holder.backbone = model
    state = {f'{prefix}{name}': value for name, value in source.state_dict().items()}
    (holder if prefix else model).load_state_dict(state)
    source.eval(), model.eval()
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(x)[0], source(x)[0])


# -- other networks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('network', 'options', 'said'),
    [
        ('SEResNet', dict(depth=50), r"tensors that are none of its, such as 'layer1.0.se_layer"),
        ('ResNeSt', dict(depth=50), 'none of its'),
        ('ResNeXt', dict(depth=50), 'tensors have another shape'),
        ('ResNet', dict(depth=101), 'none of its'),
    ],
)
@pytest.mark.parametrize('way', ['in a model', 'init_cfg', 'alone'])
def test_weights_of_another_network_are_refused(network, options, said, way, tmp_path):
    """mmengine loads what fits and logs a line about the rest."""
    small = dict(num_stages=1, strides=(1,), dilations=(1,), out_indices=(0,))
    small = dict(base_channels=8, stem_channels=8) if network == 'ResNet' else small
    given = MODELS.build(dict(type=f'mmpretrain.{network}', **options, **small)).state_dict()
    cfg = dict(type='mmpretrain.GatedResNet', depth=50, **small)
    if way == 'alone':
        given['head.fc.weight'] = torch.zeros(3, 3)
    else:
        given = {f'backbone.{name}': value for name, value in given.items()}
    torch.save(dict(state_dict=given), tmp_path / 'a.pth')
    start = dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'), prefix='backbone.')
    wanted = r"GatedResNet gates a ResNet, .* of another network: .*{}.*type='Gated', backbone="
    model = MODELS.build(dict(cfg, init_cfg=start) if way == 'init_cfg' else cfg)
    holder = nn.Module()
    holder.backbone = model
    with pytest.raises(ValueError, match=wanted.format(said)):
        if way == 'init_cfg':
            model.init_weights()
        else:
            load_checkpoint(model if way == 'alone' else holder, str(tmp_path / 'a.pth'))


def test_what_is_usual_is_not_refused():
    """The bias of the public Caffe weights, a classifier beside, a first layer for other pictures,
    gates, and a part of the network."""
    state = make(gate=None).state_dict()
    state['conv1.bias'] = torch.zeros(8)
    state['fc.weight'] = torch.zeros(10, 64)
    state['conv1.weight'] = torch.zeros(8, 1, 7, 7)
    state['gates.layer9-9-conv1.fc1.weight'] = torch.zeros(16, 8)
    state = {name: value for name, value in state.items() if not name.startswith('layer4')}
    model = make()
    load_state_dict(model, state)
    load_state_dict(make(gate=None), state)
    assert_loaded(model, {'layer1.0.conv1.weight': state['layer1.0.conv1.weight']})


def test_a_network_of_no_name_is_as_free_as_upstream():
    network = nn.Sequential(nn.Conv2d(3, 4, 1))
    watch_weights(network)
    load_state_dict(network, {'0.weight': torch.ones(4, 3, 1, 1), '0.more.weight': torch.ones(1)})
    assert (network[0].weight == 1).all()
