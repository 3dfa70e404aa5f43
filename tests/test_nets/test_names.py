# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What the names of families build, in every package."""

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from gated_resnets import gated_resnet
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope, Registry

from fgc_mm.gates import find_gates, force_gates, gated_blocks
from fgc_mm.nets import GatedResNet, GatedResNetCifar

SMALL = dict(base_channels=8, stem_channels=8)
DILATED = dict(strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4))
UPSTREAM = {
    'mmdet.ResNet': [
        dict(depth=18, stem_channels=24, base_channels=16, in_channels=4),
        dict(depth=50, style='caffe', frozen_stages=1, with_cp=True, **SMALL),
        dict(
            depth=50,
            num_stages=3,
            strides=(1, 2, 2),
            dilations=(1, 1, 1),
            out_indices=(2,),
            norm_cfg=dict(type='BN', requires_grad=False),
            **SMALL,
        ),
        dict(
            depth=50,
            plugins=[
                dict(
                    cfg=dict(type='ContextBlock', ratio=1 / 4),
                    stages=(False, True, True, True),
                    position='after_conv3',
                )
            ],
            **SMALL,
        ),
    ],
    'mmdet.ResNetV1d': [dict(depth=18, **SMALL)],
    'mmseg.ResNetV1c': [
        dict(depth=50, **DILATED, contract_dilation=True, multi_grid=(1, 2, 4), **SMALL)
    ],
    'mmpretrain.ResNet': [
        dict(depth=34, **SMALL),
        dict(depth=50, expansion=2, out_indices=(1, 3), **SMALL),
    ],
    'mmpretrain.ResNetV1d': [dict(depth=50, **SMALL)],
    'mmpretrain.MobileNetV2': [dict(widen_factor=0.35, frozen_stages=2)],
    'mmdet.MobileNetV2': [dict(widen_factor=0.35)],
    'mmseg.MobileNetV2': [dict(widen_factor=0.35, strides=(1, 2, 2, 1, 1, 1, 1))],
}
CASES = [(network, options) for network, each in UPSTREAM.items() for options in each]


def gated(network, **options):
    scope, _, name = network.partition('.')
    return MODELS.build(dict(type=f'{scope}.Gated{name}', **options))


def randomize(model):
    generator = torch.Generator().manual_seed(1)
    for value in model.state_dict().values():
        if value.dim() == 1:
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
        elif value.dim() == 4:
            value.copy_(torch.randn(value.shape, generator=generator) / value[0].numel() ** 0.5)


@pytest.mark.parametrize(('network', 'options'), CASES, ids=str)
def test_open_gates_are_upstream_bit_by_bit(network, options):
    upstream = MODELS.build(dict(type=network, **options))
    ours = gated(network, **options)
    dense = gated(network, gate=None, **options)
    randomize(upstream)
    names = list(upstream.state_dict())
    assert [name for name in ours.state_dict() if not name.startswith('gates.')] == names
    assert list(dense.state_dict()) == names and not find_gates(dense)
    assert type(ours) is type(dense) is type(upstream)
    for model in (ours, dense):
        model.load_state_dict(upstream.state_dict(), strict=False)
    x = torch.randn(2, options.get('in_channels', 3), 64, 64)
    for training in (True, False):
        for model in (upstream, ours, dense):
            model.train(training)
        wanted = upstream(x)
        with force_gates(ours, 1.0):
            for outs in (ours(x), dense(x)):
                for out, want in zip(outs, wanted, strict=True):
                    assert torch.equal(out, want)
    state = ours.state_dict()
    for name, value in upstream.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize(('depth', 'gates'), [(18, 8), (50, 32)])
def test_every_block_is_gated_and_the_stem_only_if_asked(depth, gates):
    found = find_gates(gated_resnet(depth, **SMALL))
    assert len(found) == gates
    assert all(type(gate).__name__ == 'BinConcreteGate' for gate in found.values())
    if depth == 18:  # its first shortcut adds what the stem makes
        with pytest.raises(ValueError, match="gated_blocks: 'stem' has no site"):
            gated_resnet(depth, gated_blocks=['all', 'stem'], **SMALL)
    else:
        more = find_gates(gated_resnet(depth, gated_blocks=['all', 'stem'], **SMALL))
        assert set(more) == {'gates.conv1', *found}


def test_what_one_block_hands_to_the_next_is_left_to_itself():
    """A MobileNetV2's blocks without a shortcut are sites between, of ``Gated`` and by name."""
    model = gated('mmpretrain.MobileNetV2', widen_factor=0.35)
    assert [site.source for site in model.gates.sites.values()] == list(gated_blocks(model))
    assert len(find_gates(model)) == 16
    between = 'layer1.0.conv.1.conv'
    named = gated('mmpretrain.MobileNetV2', widen_factor=0.35, gated_blocks=between)
    assert list(find_gates(named)) == ['gates.layer1-0-conv-1-conv']
    network = dict(type='mmpretrain.MobileNetV2', widen_factor=0.35)
    every = MODELS.build(dict(type='Gated', backbone=network))
    assert set(find_gates(named)) | set(find_gates(model)) <= set(find_gates(every))


@pytest.mark.parametrize(
    ('blocks', 'expected'),
    [
        ('layer4', ['layer4.0', 'layer4.1', 'layer4.2']),
        (['layer1.0', 'layer3.5', -1], ['layer1.0', 'layer3.5', 'layer4.2']),
        ('last_stage', ['layer4.0', 'layer4.1', 'layer4.2']),
        ([-2], ['layer4.1']),
        ('layer2.1.conv2', ['layer2.1']),
    ],
)
def test_which_blocks_are_gated(blocks, expected):
    assert list(gated_blocks(gated_resnet(50, gated_blocks=blocks, **SMALL))) == expected


@pytest.mark.parametrize(
    ('convs', 'count'), [('conv1', 16), (['conv2'], 16), (['layer1.0.conv2', 'conv1'], 17)]
)
def test_which_convolutions_are_gated(convs, count):
    names = list(find_gates(gated_resnet(50, gated_convs=convs, **SMALL)))
    assert len(names) == count
    assert all(name.endswith('conv1') or name == 'gates.layer1-0-conv2' for name in names) == (
        convs != ['conv2']
    )


@pytest.mark.parametrize('package', ['mmdet', 'mmseg', 'mmpretrain'])
def test_a_name_means_the_network_of_its_scope(package):
    registry = pytest.importorskip(f'{package}.registry')
    wanted = registry.MODELS.get(f'{package}.ResNet')
    cfg = dict(type='GatedResNet', depth=18, gate=dict(type='FBSGate'), **SMALL)
    plain = dict(type='Gated', backbone=dict(type='ResNet', depth=18, **SMALL))
    for each in (cfg, plain):
        built = [registry.MODELS.build(dict(each)), MODELS.build(dict(each, _scope_=package))]
        with DefaultScope.overwrite_default_scope(package):
            built.append(MODELS.build(dict(each)))
        assert [type(model) for model in built] == [wanted] * 3
        assert all(len(find_gates(model)) == 8 for model in built)
    with DefaultScope.overwrite_default_scope(package):
        assert type(GatedResNet(18, gate=None)) is wanted


DEMOS = dict(
    mmdet=('faster_rcnn_r18_digits_gated', 'mmdet.apis.init_detector'),
    mmseg=('pspnet_r18_digits_gated', 'mmseg.apis.init_model'),
    mmpretrain=('resnet18_digits_gated', 'mmpretrain.get_model'),
)


@pytest.mark.parametrize('package', DEMOS)
def test_the_packages_own_builders_of_models(package):
    name, function = DEMOS[package]
    module, _, function = function.rpartition('.')
    init = getattr(importlib.import_module(module), function)
    configs = Path(__file__).parents[2] / 'configs/demo'
    model = init(Config.fromfile(configs / f'{name}.py'), device='cpu')
    assert type(model.backbone).__module__.startswith(f'{package}.')
    assert len(find_gates(model)) == 8


def test_a_named_package_wins_over_the_scope():
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(dict(type='mmdet.GatedResNet', depth=18, **SMALL))
    assert type(model).__module__.startswith('mmdet.') and model.norm_eval


def test_without_a_scope_the_one_package_that_is_imported(monkeypatch):
    for package in ('mmdet', 'mmseg'):
        importlib.import_module(f'{package}.registry')
    children = dict(MODELS.children)
    monkeypatch.setattr(MODELS, '_children', {'mmseg': children['mmseg']})
    assert type(MODELS.build(dict(type='GatedResNet', depth=18))).__module__.startswith('mmseg.')
    monkeypatch.setattr(MODELS, '_children', {k: children[k] for k in ('mmseg', 'mmdet')})
    with pytest.raises(
        ValueError, match=r'in 2 .*mmseg.GatedResNet, mmdet.GatedResNet.*default_sc'
    ):
        MODELS.build(dict(type='GatedResNet', depth=18))
    monkeypatch.setattr(MODELS, '_children', {})
    with pytest.raises(ValueError, match=r"no package is imported .* 'mmdet.GatedResNet' or"):
        MODELS.build(dict(type='GatedResNet', depth=18))


def test_a_package_that_is_imported_later_gets_the_names():
    """Also one that nobody here knows: its own network of the name, or a clear error."""
    child = Registry('model', parent=MODELS, scope='someones', locations=['fgc_mm.errors'])
    try:
        with pytest.raises(ValueError, match=r'someones has no ResNet; .*Gated'):
            child.build(dict(type='GatedResNet', depth=18))

        @child.register_module()
        class ResNet(nn.Sequential):
            def __init__(self, width):
                super().__init__(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 4, 3))

        model = child.build(dict(type='GatedResNet', width=6, gated_blocks='stem'))
        assert type(model) is ResNet and [g.channels for g in find_gates(model).values()] == [6]
    finally:
        del MODELS.children['someones']


def test_pretrained_is_handed_on_as_the_package_takes_it():
    for scope in ('mmdet', 'mmseg', 'mmpretrain'):
        model = gated_resnet(scope=scope, pretrained='a.pth', **SMALL)
        assert model.init_cfg == dict(type='Pretrained', checkpoint='a.pth')


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(depth=20), 'invalid depth 20'),
        (dict(gated_blocks=['layer5']), "gated_blocks: 'layer5' names no block"),
        (dict(gated_blocks=[8]), 'gated_blocks: block index 8 is out of range'),
        (dict(gated_convs=['conv2']), r"gated_convs=\['conv2'\]: 'conv2' is no site; .* conv1"),
        (dict(gated_convs=[]), r'gated_convs=\[\]'),
        (dict(gate='BinConcreteGate'), "gate='BinConcreteGate' must be a dict"),
        (dict(gate=dict(type='BN')), "gate: type='BN' is no gate; .*BinConcreteGate"),
        (dict(gate=dict(type='Bin')), "gate: type='Bin' is not .* BinConcreteGate"),
        (dict(gate=dict(type='FBSGate', channels=7)), 'gate: channels=7 .* needs 8'),
        (dict(pretrained=3), 'pretrained=3 must be a str or None'),
        (
            dict(pretrained='a.pth', init_cfg=dict(type='Pretrained', checkpoint='b.pth')),
            "either pretrained='a.pth' or init_cfg",
        ),
        (dict(dept=18), r"no argument 'dept' \(did you mean 'depth'.*type='Gated', backbone="),
        (
            dict(groups=32, width_per_group=4),
            r"ResNet of mmdet, gated: it has no argument 'groups', 'width_per_group'; another "
            r"network keeps its own config: type='Gated', backbone=dict\(type=\.\.\., groups",
        ),
    ],
)
def test_bad_values(options, words):
    with pytest.raises((ValueError, KeyError), match=words):
        gated_resnet(**{**SMALL, **options})


def test_what_is_needed_and_what_a_package_lacks():
    with pytest.raises(ValueError, match=r"needs the argument 'depth'; .* type='Gated'"):
        MODELS.build(dict(type='mmdet.GatedResNet'))
    with pytest.raises(ValueError, match=r'mmdet has no ResNetV1c; .*mmpretrain.GatedResNetV1c'):
        MODELS.build(dict(type='mmdet.GatedResNetV1c', depth=18))
    with pytest.raises(ValueError, match=r'GatedResNetCifar .* no argument .groups.'):
        GatedResNetCifar(20, groups=2)
