# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Networks as files: saved, loaded, refused."""

import pickle

import pytest
import torch
import torch.nn as nn
import torchvision
from mmengine.config import Config
from mmengine.registry import MODELS
from small_tasks import register, retinanet

import fgc_mm
from fgc_mm.errors import CheckpointError, UsageError
from fgc_mm.gates import find_gates
from fgc_mm.inference import GateUsage, slim
from fgc_mm.runtime.checkpoints.publish import published

MOBILENET = dict(type='torchvision.models.mobilenet_v3_small', num_classes=5)
X = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))


def varied(model):
    """Gates that open some channels always, some never, some for some pictures."""
    for gate in find_gates(model).values():
        nn.init.normal_(gate.fc2.weight)
        gate.fc2.bias.data.copy_(torch.linspace(-20, 20, gate.channels))
    model.eval()
    return model


def mobilenet():
    torch.manual_seed(0)
    net = torchvision.models.mobilenet_v3_small(num_classes=5).eval()
    return varied(fgc_mm.gate(net, X[:1], sites=['features.4', 'features.5']))


def slimmed(model, run):
    usage = GateUsage(model)
    usage.attach()
    with torch.no_grad():
        run(model)
    usage.detach()
    return slim(model, usage.shares()).model


@torch.no_grad()
def test_a_network_of_torchvision_gated_and_slimmed(tmp_path):
    net = mobilenet()
    smaller = slimmed(net, lambda model: model(X))
    assert smaller.features[4].block[0][0].out_channels < 96
    for number, model in enumerate((net, smaller)):
        path = tmp_path / f'{number}.pth'
        fgc_mm.save(model, path, MOBILENET)
        loaded = fgc_mm.load(path)
        assert type(loaded) is torchvision.models.MobileNetV3 and not loaded.training
        assert torch.equal(loaded(X), model(X))
        assert list(find_gates(loaded)) == list(find_gates(model))
    # Loaded, slimmed further, and saved again.
    again = slimmed(loaded, lambda model: model(X[:1]))
    fgc_mm.save(again, path, MOBILENET)
    assert torch.equal(fgc_mm.load(path)(X), again(X))


@torch.no_grad()
def test_without_a_gate_left_and_without_any(tmp_path):
    net = mobilenet()
    for gate in find_gates(net).values():
        gate.fc2.weight.zero_()
        gate.fc2.bias.copy_(torch.where(torch.arange(gate.channels) % 2 == 0, 5.0, -5.0))
    dense = slimmed(net, lambda model: model(X))
    assert not find_gates(dense)
    plain = torchvision.models.mobilenet_v3_small(num_classes=5).eval()
    for number, model in enumerate((dense, plain)):
        fgc_mm.save(model, tmp_path / f'{number}.pth', MOBILENET)
        assert torch.equal(fgc_mm.load(tmp_path / f'{number}.pth')(X), model(X))


@pytest.mark.parametrize('gated', [True, False])
@torch.no_grad()
def test_a_detector_of_a_config(tmp_path, gated):
    """Its config gates it, or somebody has done so by hand."""
    register('mmdet')
    cfg = retinanet()
    cfg['backbone'].pop('gate')
    cfg['backbone']['type'] = 'Gated' if gated else 'ResNet'
    if gated:
        backbone = dict(cfg['backbone'], type='ResNet')
        cfg['backbone'] = dict(type='Gated', backbone=backbone, init_cfg=None)
        cfg['backbone'].pop('init_cfg')
    cfg = Config(dict(model=cfg)).model
    torch.manual_seed(0)
    model = MODELS.build(cfg)
    if not gated:
        fgc_mm.gate(model.backbone, X[:1], sites='last_stage')
    varied(model)
    model.dataset_meta = dict(classes=('a', 'b'))

    def run(net):
        return [out for outs in net(X, mode='tensor') for out in outs]

    for number, net in enumerate((model, slimmed(model, run))):
        path = tmp_path / f'{number}.pth'
        fgc_mm.save(net, path, cfg, scope='mmdet')
        loaded = fgc_mm.load(path)
        assert loaded.dataset_meta == model.dataset_meta
        for out, want in zip(run(loaded), run(net), strict=True):
            assert torch.equal(out, want) and want.std() > 0
    # A Runner's checkpoint says it in the text of its config, which is read and not run.
    text = Config(dict(default_scope='mmdet', model=cfg)).pretty_text
    torch.save(dict(meta=dict(cfg=text), state_dict=model.state_dict()), path)
    if gated:
        assert torch.equal(run(fgc_mm.load(path))[0], run(model)[0])
    else:
        with pytest.raises(CheckpointError, match='its weights are not those of what it describes'):
            fgc_mm.load(path)


def test_weights_of_another_graph_are_refused(tmp_path):
    def build(**options):
        backbone = dict(type='mmdet.ResNet', depth=18, base_channels=8)
        return MODELS.build(dict(type='Gated', backbone=backbone, **options))

    net = build()
    torch.save(net.state_dict(), tmp_path / 'a.pth')
    state = torch.load(tmp_path / 'a.pth', weights_only=True)
    build().load_state_dict(state)
    # Other gates of the same network fit as far as they are the same.
    build(sites='last_stage').load_state_dict(state, strict=False)
    with pytest.raises(CheckpointError, match=r"its gate of 'layer1\.0\.conv1' decides over 8 c"):
        build(widths={'layer1.0.conv1': 3}).load_state_dict(state, strict=False)
    small = published(dict(meta={}, state_dict=state))['state_dict']
    with pytest.raises(CheckpointError, match='the checkpoint is of another network'):
        build(widths={'layer1.0.conv1': 3}).load_state_dict(small, strict=False)
    # What another network reads in its place.
    other = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1] * 4)
    other.layer1[0].conv2 = nn.Sequential(other.layer1[0].conv2)
    fgc_mm.gate(other, X[:1])
    plain = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1] * 4)
    fgc_mm.gate(plain, X[:1])
    with pytest.raises(CheckpointError, match=r'read by layer1\.0\.conv2, and here over'):
        other.load_state_dict(plain.state_dict(), strict=False)


class Marker:
    """Leaves a file behind if it is unpickled as it asks for."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), 'w')


def write(path, **changes):
    described = dict(version=1, model=dict(MOBILENET), scope=None, gating=[])
    torch.save(dict(meta=dict(fgc_mm={**described, **changes}), state_dict={}), path)
    return path


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            dict(model=dict(type='os.system', command='true')),
            "'os.system' is of no package",
        ),
        (dict(model=dict(type='antigravity')), "model.type='antigravity' is not registered"),
        (dict(model=dict(type='torchvision.io.read_file')), 'is no network of torchvision.models'),
        (dict(model=dict(type='timm.nothing')), "'timm.nothing' is no network of timm"),
        (
            dict(scope='mmdet', model=dict(type='RetinaNet', test_cfg=dict(a='__import__("os")'))),
            'is no plain string',
        ),
        (
            dict(scope='mmdet', model=dict(type='RetinaNet', neck=dict(type='mmdet.a.b'))),
            'is no name of a type',
        ),
        (dict(scope='os'), "scope='os' must be one of mmdet"),
        (dict(version=9), 'is of version 9 of these files'),
        (dict(model=None), 'does not say what builds its network'),
        (dict(gating=[dict(network='')]), 'a gating must have gate, sites, widths'),
        (dict(), 'its weights are not those of what it describes'),
    ],
)
def test_what_a_file_must_not_say(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        fgc_mm.load(write(tmp_path / 'x.pth', **changes))


def test_files_that_run_code_or_say_nothing(tmp_path):
    path, mark = tmp_path / 'x.pth', tmp_path / 'mark'
    torch.save(dict(state_dict={}, more=Marker(mark)), path, pickle_module=pickle)
    with pytest.raises(CheckpointError, match='which no weights are made of'):
        fgc_mm.load(path)
    text = f'model = dict(type=open({str(mark)!r}, "w"))'
    torch.save(dict(meta=dict(cfg=text), state_dict={}), path)
    with pytest.raises(CheckpointError, match='is Python code'):
        fgc_mm.load(path)
    assert not mark.exists()
    torch.save(dict(state_dict={}), path)
    with pytest.raises(CheckpointError, match='does not say what builds its network'):
        fgc_mm.load(path)
    with pytest.raises(CheckpointError, match='does not exist'):
        fgc_mm.load(tmp_path / 'none.pth')


def test_what_cannot_be_saved(tmp_path):
    net, path = mobilenet(), tmp_path / 'x.pth'
    for model, message in {
        'resnet50': 'must say what builds the network',
        dict: 'must say what builds the network',
    }.items():
        with pytest.raises(UsageError, match=message):
            fgc_mm.save(net, path, model)
    with pytest.raises(UsageError, match=r'model\.norm_layer=.* is no plain value'):
        fgc_mm.save(net, path, dict(MOBILENET, norm_layer=nn.BatchNorm2d))
    with pytest.raises(CheckpointError, match=r"'torchvision\.models\.nothing' is no network"):
        fgc_mm.save(net, path, dict(type='torchvision.models.nothing'))
    assert not path.exists()
