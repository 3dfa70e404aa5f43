# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which channels GatedResNet switches."""

import copy

import pytest
import torch
import torch.nn as nn
from gated_resnets import GATES, images, make
from mmengine.registry import MODELS

from fgc_mm.gates import find_gates, force_gates, gated_blocks
from fgc_mm.nets import GatedResNet


@pytest.mark.parametrize('depth, gates, convs', [(18, 8, ('conv1',)), (50, 32, ('conv1', 'conv2'))])
def test_gates_on_by_default(depth, gates, convs):
    model = GatedResNet(depth, base_channels=8)
    assert len(find_gates(model)) == gates and model.gated_convs == convs
    assert all(type(gate).__name__ == 'BinConcreteGate' for gate in find_gates(model).values())
    assert model.gated_block_names == model.block_names
    names = [name for name, _ in model.named_parameters() if 'fc' in name]
    assert names and all('gate' in name for name in names)


def test_no_gate_is_the_dense_network():
    model = GatedResNet(18, base_channels=8, gate=None)
    assert not find_gates(model) and not any('gate' in name for name in model.state_dict())
    assert not any(
        block.gate_sites()
        for stage in model.children()
        if isinstance(stage, nn.Sequential)
        for block in stage
    )


@pytest.mark.parametrize(
    'gated_blocks_cfg, expected',
    [
        ('layer4', ['layer4.0', 'layer4.1', 'layer4.2']),
        (['layer1.0', 'layer3.5', -1], ['layer1.0', 'layer3.5', 'layer4.2']),
        ('last_stage', ['layer4.0', 'layer4.1', 'layer4.2']),
        ([-2], ['layer4.1']),
    ],
)
def test_which_blocks_are_gated(gated_blocks_cfg, expected):
    model = GatedResNet(50, base_channels=8, gated_blocks=gated_blocks_cfg)
    assert list(gated_blocks(model)) == model.gated_block_names == expected
    model(torch.rand(2, 3, 64, 64))


@pytest.mark.parametrize('convs', ['conv1', ['conv2']])
def test_which_convolutions_are_gated(convs):
    model = make(gated_convs=convs)
    number = 1 if convs == 'conv1' else 2
    assert {name.rpartition('.')[2] for name in find_gates(model)} == {f'gate{number}'}
    model(images(2))


def test_sites_name_modules_of_the_block():
    for depth in (18, 50):
        for name in gated_blocks(model := make(depth)):
            block = model.get_submodule(name)
            sites = block.gate_sites()
            assert [site.gate for site in sites] == list(block.gates())
            for site in sites:
                gate = block.get_submodule(site.gate)
                produced = [block.get_submodule(conv).out_channels for conv in site.produces]
                consumed = [block.get_submodule(conv).in_channels for conv in site.consumes]
                norm = block.get_submodule(site.norm)
                assert produced == consumed == [gate.channels] == [norm.num_features]
                assert gate.in_channels == block.conv1.in_channels


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('depth', [18, 50])
def test_a_closed_channel_is_zero_at_the_consumer(depth, gate, training):
    model = make(depth, gate=GATES[gate]).train(training)
    seen = {}
    for name in gated_blocks(model):
        block = model.get_submodule(name)
        for site in block.gate_sites():
            for conv in site.consumes:
                block.get_submodule(conv).register_forward_pre_hook(
                    lambda module, args, key=f'{name}.{site.gate}': seen.update({key: args[0]})
                )
    model(images())
    gates = find_gates(model)
    assert seen.keys() == gates.keys()
    for name, feature in seen.items():
        record = gates[name].record
        assert 0 < record.mask.mean() < 1
        assert (feature[record.mask == 0] == 0).all()
        alive = feature.abs().sum(dim=(2, 3)) > 0
        assert alive.any() and torch.equal(alive, (record.mask * record.feature) > 0)


def test_masks_are_hard_and_the_recorded_feature_is_the_ungated_one():
    """Against the block computed by hand."""
    model = make(18).train()
    block = model.layer1[1]
    inputs = []
    block.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().clone()))
    state = copy.deepcopy(block.state_dict())
    model(images())
    record = block.gate1.record
    assert set(record.mask.unique().tolist()) == {0.0, 1.0}

    x = inputs[0].double()
    fresh = copy.deepcopy(block).double().train()
    fresh.load_state_dict(state)
    feature = fresh.bn1(fresh.conv1(x)).clamp(min=0)
    assert torch.allclose(record.feature.double(), feature.mean(dim=(2, 3)), atol=1e-5)
    hidden = fresh.gate1.fc1(x.mean(dim=(2, 3)))
    hidden = (hidden - hidden.mean(1, True)) / (
        hidden.var(1, unbiased=False, keepdim=True) + 1e-5
    ).sqrt()
    logits = fresh.gate1.fc2(hidden.clamp(min=0))
    assert torch.allclose(record.logits.double(), logits, atol=1e-4)
    assert not record.feature.requires_grad


def test_all_closed_leaves_the_shortcut():
    """The shortcut is never gated: with every gate closed only norm2's bias is added."""
    model = make(18).eval()
    block = model.layer1[1]
    x = torch.rand(2, 8, 16, 16)
    with force_gates(block, 0.0):
        out = block(x)
    constant = block.bn2(torch.zeros(1, 8, 1, 1))
    assert torch.allclose(out, (x + constant).clamp(min=0), atol=1e-6)


@pytest.mark.parametrize('gate', GATES)
def test_evaluation_is_deterministic_and_each_image_alone(gate):
    model = make(50, gate=GATES[gate]).eval()
    x = images()
    with torch.no_grad():
        outs = model(x)
        masks = {name: gate.record.mask for name, gate in find_gates(model).items()}
        again = model(x)
        assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True))
        for i in (0, 3):
            alone = model(x[i : i + 1])
            for name, module in find_gates(model).items():
                assert torch.equal(module.record.mask[0], masks[name][i]), name
            assert (alone[-1][0] - outs[-1][i]).abs().max() < 1e-4 * outs[-1][i].max()
    assert any(not torch.equal(mask[0], mask[3]) for mask in masks.values())


def test_train_returns_self_and_output_is_a_tuple():
    model = make(18, out_indices=(3,))
    assert model.train() is model and model.eval() is model
    outs = model(images(1))
    assert isinstance(outs, tuple) and len(outs) == 1


@pytest.mark.parametrize('package', ['mmdet', 'mmseg', 'mmpretrain'])
def test_found_by_its_plain_name(package):
    registry = pytest.importorskip(f'{package}.registry')
    cfg = dict(type='GatedResNet', depth=18, base_channels=8, gate=dict(type='FBSGate'))
    for models in (registry.MODELS, MODELS):
        assert isinstance(models.build(dict(cfg)), GatedResNet)


@pytest.mark.parametrize(
    'kwargs, error, words',
    [
        (dict(depth=20), ValueError, r'depth=20 must be one of \[18, 34, 50, 101, 152\]'),
        (dict(gated_blocks=['layer5']), ValueError, "gated_blocks: 'layer5' names no block"),
        (dict(gated_blocks=[8]), ValueError, 'gated_blocks: block index 8 is out of range'),
        (dict(gated_convs=['conv2']), ValueError, r"gated_convs=\('conv2',\) .* \('conv1',\)"),
        (dict(gated_convs=[]), ValueError, r"gated_convs=\(\) must be some of \('conv1',\)"),
        (dict(out_indices=(4,)), ValueError, r'out_indices=\(4,\) must be some of \(0, 1, 2, 3\)'),
        (dict(frozen_stages=5), ValueError, 'frozen_stages=5 must be within -1 and 4'),
        (dict(num_stages=3), ValueError, r'strides=\(1, 2, 2, 2\) must have num_stages=3'),
        (dict(num_stages=5), ValueError, 'num_stages=5 must be 1, 2, 3 or 4'),
        (dict(style='torch'), ValueError, "style='torch' must be 'pytorch' or 'caffe'"),
        (dict(multi_grid=(1,)), ValueError, r'multi_grid=\(1,\) .* each of the 2 blocks'),
        (dict(dcn=dict(type='DCN')), ValueError, 'dcn=.* is not supported'),
        (dict(plugins=[dict()]), ValueError, 'plugins=.* is not supported'),
        (dict(gate='BinConcreteGate'), ValueError, "gate='BinConcreteGate' must be a dict"),
        (dict(gate=dict(type='BN')), ValueError, "gate: type='BN' is no gate; .*BinConcreteGate"),
        (dict(gate=dict(type='Bin')), ValueError, "gate: type='Bin' is not .* BinConcreteGate"),
        (dict(gate=dict(type='FBSGate', channels=7)), ValueError, 'gate: channels=7 .* needs 8'),
        (dict(expansion=4), ValueError, 'expansion=4 must be 1'),
        (dict(pretrained=3), ValueError, 'pretrained=3 must be a str or None'),
        (
            dict(pretrained='a.pth', init_cfg=dict(type='Pretrained', checkpoint='b.pth')),
            ValueError,
            "either pretrained='a.pth' or init_cfg",
        ),
    ],
)
def test_bad_values(kwargs, error, words):
    with pytest.raises(error, match=words):
        GatedResNet(**{'depth': 18, 'base_channels': 8, **kwargs})
