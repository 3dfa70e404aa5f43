# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Initialization, and weights from elsewhere."""

import logging

import pytest
import torch
import torch.nn as nn
from mmengine.logging import MMLogger

from fgc_mm.gates import find_gates
from fgc_mm.nets import GatedResNet


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
    return GatedResNet(**{'depth': 18, 'base_channels': 8, **kwargs})


def dense_file(path, drop=(), **kwargs):
    """A checkpoint of a dense network with values of its own."""
    model = make(gate=None, **kwargs)
    state = {
        name: torch.rand_like(value) + 0.5 if value.is_floating_point() else value
        for name, value in model.state_dict().items()
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
        [dict(type='Kaiming', layer=['Conv2d', 'Linear'])],
        [dict(type='TruncNormal', layer=['Linear'], std=0.02, bias=0.0)],
        dict(type='Normal', layer=['Linear', 'Conv2d'], std=0.01),
    ],
)
def test_gate_bias_survives_init_weights(init_cfg):
    model = make(init_cfg=init_cfg, gate=dict(type='BinConcreteGate', bias_init=2.5))
    model.init_weights()
    assert_gates_fresh(model, 2.5)


def test_from_scratch_as_upstream():
    """Kaiming, unit norms, and zero where a residual branch ends."""
    for zero in (True, False):
        for depth, last in ((18, 'bn2'), (50, 'bn3')):
            model = make(depth=depth, zero_init_residual=zero)
            model.init_weights()
            for name, module in model.named_modules():
                if isinstance(module, nn.BatchNorm2d):
                    closed = zero and name.endswith(f'.{last}')
                    assert (module.weight == (0 if closed else 1)).all(), name
    conv = make(base_channels=64).layer2[1].conv1
    fan_out = 128 * 9
    model = make(base_channels=64)
    model.init_weights()
    assert conv.weight.shape == (128, 128, 3, 3)
    assert model.layer2[1].conv1.weight.std().item() == pytest.approx(
        (2 / fan_out) ** 0.5, rel=0.02
    )


def test_the_whole_model_initializes_its_gates():
    """Through a task model's init_weights, as the Runner does it."""
    mmpretrain = pytest.importorskip('mmpretrain.models')
    model = mmpretrain.ImageClassifier(
        backbone=dict(type='GatedResNet', depth=18, base_channels=8),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=3, in_channels=64),
        init_cfg=dict(type='Normal', layer='Linear', std=0.01),
    )
    model.init_weights()
    assert_gates_fresh(model.backbone)
    assert model(torch.rand(2, 3, 64, 64), mode='tensor').shape == (2, 3)


@pytest.mark.parametrize('depth', [18, 34, 50])
def test_torchvision_weights_through_init_cfg(depth, tmp_path, messages):
    torchvision = pytest.importorskip('torchvision')
    theirs = getattr(torchvision.models, f'resnet{depth}')()
    torch.save(theirs.state_dict(), tmp_path / 'weights.pth')
    model = GatedResNet(
        depth, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'weights.pth'))
    )
    model.init_weights()
    state = theirs.state_dict()
    assert_loaded(model, {name: value for name, value in state.items() if name[:3] != 'fc.'})
    assert_gates_fresh(model)
    keys = [name for name in model.state_dict() if '.gate' in name and 'num_batches' not in name]
    gates = len(find_gates(model))
    assert (
        'INFO',
        f'GatedResNet: {len(keys)} keys of {gates} gates are new, not in the checkpoint',
    ) in messages
    assert not any('missing' in text for _, text in messages)


def test_pretrained_is_short_for_init_cfg(tmp_path):
    state = dense_file(tmp_path / 'dense.pth')
    model = make(pretrained=str(tmp_path / 'dense.pth'))
    model.init_weights()
    assert_loaded(model, state)
    assert_gates_fresh(model)


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
    assert not any('.gate1.fc' in text for text in warnings)
    assert any('keys of 8 gates are new' in text for _, text in messages)


def test_half_the_gates_are_counted_too(tmp_path, messages):
    torch.save(make(gated_blocks='layer4').state_dict(), tmp_path / 'part.pth')
    model = make(pretrained=str(tmp_path / 'part.pth'))
    model.init_weights()
    assert any('keys of 6 gates are new' in text for _, text in messages)


def test_weights_of_something_else_are_refused(tmp_path):
    torch.save({'encoder.weight': torch.zeros(1)}, tmp_path / 'other.pth')
    model = make(pretrained=str(tmp_path / 'other.pth'))
    with pytest.raises(ValueError, match=r"none of the network's 100 keys.*prefix"):
        model.init_weights()


def test_a_gated_classifier_keeps_its_gates_in_a_detector(tmp_path, messages):
    classifier = make(gate=dict(type='BinConcreteGate', norm_cfg=dict(type='LN')))
    with torch.no_grad():
        for value in classifier.parameters():
            value.uniform_(-1, 1)
    state = {f'backbone.{name}': value for name, value in classifier.state_dict().items()}
    state['head.fc.weight'] = torch.zeros(3, 64)
    torch.save(dict(state_dict=state, meta={}), tmp_path / 'classifier.pth')
    backbone = make(
        gate=dict(type='BinConcreteGate', norm_cfg=dict(type='LN')),
        frozen_stages=1,
        norm_eval=True,
        init_cfg=dict(
            type='Pretrained', checkpoint=str(tmp_path / 'classifier.pth'), prefix='backbone.'
        ),
    )
    backbone.init_weights()
    assert_loaded(backbone, classifier.state_dict())
    assert not any('missing' in text or 'are new' in text for _, text in messages)


def test_strict_loading_is_as_strict_as_ever(tmp_path):
    """Only init_weights forgives missing gates, resuming does not."""
    state = dense_file(tmp_path / 'dense.pth')
    model = make()
    model.init_weights()
    with pytest.raises(RuntimeError, match=r'layer1\.0\.gate1\.fc1\.weight'):
        model.load_state_dict(state)


def test_mmpretrain_deep_stem_inside_a_model(tmp_path):
    """Its other names are read under a prefix as well."""
    mmpretrain = pytest.importorskip('mmpretrain.models')
    theirs = mmpretrain.ResNetV1d(depth=50, base_channels=8, stem_channels=8)
    torch.save(
        {f'backbone.{name}': value for name, value in theirs.state_dict().items()},
        tmp_path / 'v1d.pth',
    )
    holder = nn.Module()
    holder.backbone = make(depth=50, deep_stem=True, avg_down=True, gate=None)
    holder.load_state_dict(torch.load(tmp_path / 'v1d.pth', weights_only=True))
    x = torch.rand(1, 3, 64, 64)
    theirs.eval()
    assert torch.allclose(holder.eval().backbone(x)[-1], theirs(x)[-1], atol=1e-5)
