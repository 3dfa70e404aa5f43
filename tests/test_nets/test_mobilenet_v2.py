# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""GatedMobileNetV2 against mmpretrain, mmdet and mmseg."""

import mmdet.models.backbones
import mmpretrain.models.backbones
import mmseg.models.backbones
import pytest
import torch
from mmengine.registry import MODELS

from fgc_mm.gates import force_gates
from fgc_mm.nets import GatedMobileNetV2


def no_gates(names):
    return [name for name in names if 'gate' not in name]


def randomize_statistics(model):
    for name, value in model.state_dict().items():
        if name.endswith('running_mean'):
            value.uniform_(-0.2, 0.2)
        elif name.endswith('running_var'):
            value.uniform_(0.6, 1.4)


def compare(upstream, ours, x, training):
    """Outputs, statistics and gradients with all gates open."""
    randomize_statistics(upstream)
    result = ours.load_state_dict(upstream.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert no_gates(result.missing_keys) == []
    upstream.train(training)
    ours.train(training)
    expected = upstream(x)
    expected = expected if isinstance(expected, tuple) else (expected,)
    with force_gates(ours, 1.0):
        outs = ours(x)
    assert isinstance(outs, tuple) and len(outs) == len(expected)
    for out, wanted in zip(outs, expected, strict=True):
        assert out.shape == wanted.shape
        assert (out - wanted).abs().max() <= 1e-5
    sum(out.square().mean() for out in outs).backward()
    sum(out.square().mean() for out in expected).backward()
    theirs, own = dict(upstream.named_parameters()), dict(ours.named_parameters())
    for name in no_gates(own):
        assert own[name].requires_grad == theirs[name].requires_grad, name
        if theirs[name].grad is not None:
            torch.testing.assert_close(
                own[name].grad, theirs[name].grad, atol=1e-6, rtol=1e-3, msg=name
            )


@pytest.mark.parametrize('training', [True, False], ids=['train', 'eval'])
@pytest.mark.parametrize(
    'options',
    [
        dict(),
        dict(widen_factor=0.5, out_indices=(1, 2, 4, 6, 7)),
        dict(widen_factor=0.35, act_cfg=dict(type='HSwish')),
        dict(widen_factor=0.5, frozen_stages=0),
        dict(widen_factor=0.5, frozen_stages=3),
        dict(widen_factor=0.5, frozen_stages=7, norm_eval=True),
        dict(widen_factor=0.5, norm_eval=True, with_cp=True),
        dict(widen_factor=1.4, norm_cfg=dict(type='BN', requires_grad=False)),
    ],
    ids=str,
)
def test_equals_mmpretrain(options, training):
    torch.manual_seed(0)
    upstream = mmpretrain.models.backbones.MobileNetV2(**options)
    ours = GatedMobileNetV2(**options)
    assert no_gates(ours.state_dict()) == list(upstream.state_dict())
    assert list(GatedMobileNetV2(gate=None, **options).state_dict()) == list(upstream.state_dict())
    compare(upstream, ours, torch.randn(2, 3, 64, 64, requires_grad=True), training)


@pytest.mark.parametrize('training', [True, False], ids=['train', 'eval'])
@pytest.mark.parametrize(
    'options',
    [
        dict(strides=(1, 2, 2, 1, 1, 1, 1), dilations=(1, 1, 1, 2, 2, 4, 4)),
        dict(out_indices=(6,), frozen_stages=2),
    ],
    ids=str,
)
def test_equals_mmseg(options, training):
    torch.manual_seed(0)
    options = dict(dict(widen_factor=0.5, out_indices=(1, 2, 4, 6)), **options)
    upstream = mmseg.models.backbones.MobileNetV2(**options)
    ours = GatedMobileNetV2(last_conv=False, **options)
    assert no_gates(ours.state_dict()) == list(upstream.state_dict())
    compare(upstream, ours, torch.randn(2, 3, 64, 64), training)


@pytest.mark.parametrize('training', [True, False], ids=['train', 'eval'])
def test_takes_the_weights_of_mmdet(training, tmp_path):
    """mmdet's names differ, and load both directly and by ``init_cfg``."""
    torch.manual_seed(0)
    options = dict(widen_factor=0.5, out_indices=(2, 4, 6))
    upstream = mmdet.models.backbones.MobileNetV2(**options)
    randomize_statistics(upstream)
    torch.save(dict(state_dict=upstream.state_dict()), tmp_path / 'mmdet.pth')
    ours = GatedMobileNetV2(
        init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'mmdet.pth')), **options
    )
    ours.init_weights()
    direct = GatedMobileNetV2(**options)
    result = direct.load_state_dict(upstream.state_dict(), strict=False)
    assert not result.unexpected_keys and no_gates(result.missing_keys) == []
    for name in no_gates(ours.state_dict()):
        assert torch.equal(ours.state_dict()[name], direct.state_dict()[name]), name
    x = torch.randn(2, 3, 64, 64)
    upstream.train(training)
    ours.train(training)
    with torch.no_grad(), force_gates(ours, 1.0):
        for out, wanted in zip(ours(x), upstream(x), strict=True):
            assert (out - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize('scope', ['mmdet', 'mmseg', 'mmpretrain'])
def test_is_found_in_every_scope(scope):
    module = pytest.importorskip(f'{scope}.registry')
    cfg = dict(type='GatedMobileNetV2', widen_factor=0.35, out_indices=(1, 2))
    model = module.MODELS.build(cfg)
    assert isinstance(model, GatedMobileNetV2)
    assert [tuple(out.shape) for out in model(torch.rand(1, 3, 64, 64))] == [
        (1, 8, 16, 16),
        (1, 16, 8, 8),
    ]


def test_cifar_variant_keeps_the_resolution_of_the_first_stages():
    options = dict(stem_stride=1, strides=(1, 1, 2, 2, 1, 2, 1), out_indices=(0, 1, 2, 3, 5, 7))
    outs = GatedMobileNetV2(widen_factor=0.35, **options)(torch.rand(2, 3, 32, 32))
    assert [out.shape[-1] for out in outs] == [32, 32, 16, 8, 4, 4]


def test_sites_name_expansion_depthwise_and_projection():
    model = GatedMobileNetV2()
    first, second = model.layer1[0], model.layer2[0]
    (site,) = first.gate_sites()
    assert (site.produces, site.consumes) == (('conv.0.conv',), ('conv.0.conv', 'conv.1.conv'))
    assert site.norm == 'conv.0.bn'
    (site,) = second.gate_sites()
    assert site.produces == ('conv.0.conv', 'conv.1.conv')
    assert site.consumes == ('conv.1.conv', 'conv.2.conv')
    assert site.norm == 'conv.1.bn'
    assert (second.gate1.in_channels, second.gate1.channels) == (16, 96)


def test_the_mask_stands_after_the_depthwise_activation():
    """A forced mask equals a projection whose closed columns are zero."""
    torch.manual_seed(0)
    dense = GatedMobileNetV2(0.35, gate=None).eval()
    model = GatedMobileNetV2(0.35).eval()
    model.load_state_dict(dense.state_dict(), strict=False)
    mask = (torch.rand(model.layer4[1].gate1.channels) > 0.5).float()
    x = torch.randn(2, 3, 64, 64)
    others = {name: 1.0 for name, _ in model.named_modules() if name.endswith('gate1')}
    with torch.no_grad():
        dense.layer4[1].conv[2].conv.weight.mul_(mask[None, :, None, None])
        with force_gates(model, {**others, 'layer4.1.gate1': mask}):
            torch.testing.assert_close(model(x)[0], dense(x)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(out_indices=(8,)), r'out_indices=\(8,\) must be from 0 to 7'),
        (dict(out_indices=(7,), last_conv=False), r'out_indices=\(7,\) must be from 0 to 6'),
        (dict(frozen_stages=8), r'frozen_stages=8 must be from -1 \(none\) to 7'),
        (dict(strides=(1, 2)), r'strides=\(1, 2\) must be 7 values of 1 or 2'),
        (dict(strides=(1, 3, 1, 1, 1, 1, 1)), 'must be 7 values of 1 or 2'),
        (dict(dilations=(0, 1, 1, 1, 1, 1, 1)), 'must be 7 values from 1'),
        (dict(stem_stride=4), 'stem_stride=4 must be 1 or 2'),
        (dict(gated_convs=['conv1']), r"gated_convs=\('conv1',\) must be some of \('depthwise',\)"),
        (dict(gated_blocks='layer8'), "'layer8' names no block"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        MODELS.build(dict(type='GatedMobileNetV2', **options))
