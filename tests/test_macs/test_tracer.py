# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Counting while a network runs."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn
from gated_resnets import gated_resnet
from left_hooks import hooks_on
from mmengine.analysis import FlopAnalyzer
from mmengine.registry import MODELS

import fgc_mm
from fgc_mm.gates import BinConcreteGate, find_gates, force_gates
from fgc_mm.macs import BackboneShare, ImageMACs, MACsTracer, count_macs

# One per family and per kind of block, small.
FAMILIES = {
    'r18': dict(type='mmdet.GatedResNet', depth=18, base_channels=8, stem_channels=8),
    'r50': dict(type='mmdet.GatedResNet', depth=50, base_channels=8, stem_channels=8),
    'r50-dilated-v1d': dict(
        type='mmdet.GatedResNet',
        depth=50,
        base_channels=8,
        stem_channels=8,
        deep_stem=True,
        avg_down=True,
        strides=(1, 2, 1, 1),
        dilations=(1, 1, 2, 4),
    ),
    'cifar20': dict(type='GatedResNetCifar', depth=20),
    'wrn': dict(type='GatedWideResNet', depth=10, widen_factor=2),
    'mobilenet': dict(type='mmpretrain.GatedMobileNetV2', widen_factor=0.25),
}


class Pair(nn.Module):
    """A 3x3 pair with a gate between, and a shortcut convolution."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 6, 3, padding=1, stride=2)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.shortcut = nn.Conv2d(4, 8, 1, stride=2)

    def forward(self, x):
        return self.conv2(torch.relu(self.conv1(x))) + self.shortcut(x)


GATE = dict(type='BinConcreteGate', hidden=2, norm_cfg=None)


def gated_pair(gate=GATE):
    return fgc_mm.gate(Pair(), torch.rand(2, 4, 8, 8), gate, sites='conv1').eval()


class Detector(nn.Module):
    """A backbone, and a head that runs on a number of regions of its own."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 1), Pair())
        fgc_mm.gate(self.backbone, torch.rand(2, 3, 8, 8), GATE, sites='1.conv1')
        self.up = nn.ConvTranspose2d(8, 5, 2, stride=2)
        self.fc = nn.Linear(8, 3)

    def forward(self, x, regions=10):
        out = self.backbone(x)
        self.up(out)
        return self.fc(out.mean(dim=(2, 3)).mean(0).expand(regions, -1))


def masks(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def test_a_gated_pair_by_hand():
    pair = gated_pair()
    open4, open1 = [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]
    with force_gates(pair, {'gates.conv1': masks(open4, open1)}):
        images = count_macs(pair, torch.rand(2, 4, 10, 12))
    # Output 5 x 6 = 30 positions: conv1 30*9*4*6, conv2 30*9*6*8, shortcut 30*4*8;
    # the gate's own: 4*2 + 2*6.
    conv1, conv2, shortcut, own = 6_480, 12_960, 960, 20
    for image, share in zip(images, (4 / 6, 1 / 6), strict=True):
        assert image.backbone_dense == image.model_dense == conv1 + conv2 + shortcut
        assert image.backbone_executed == pytest.approx((conv1 + conv2) * share + shortcut + own)
        assert image.model_executed == image.backbone_executed
        assert image.pruning_ratio == pytest.approx(
            1 - image.backbone_executed / image.backbone_dense
        )
    assert images[0].masks()['gates.conv1'].tolist() == [open4]
    assert images[1].masks()['gates.conv1'].tolist() == [open1]


def test_backbone_and_whole_model_by_hand():
    model = Detector().eval()
    with force_gates(model, 0.0):
        image = count_macs(model, torch.rand(2, 3, 8, 8), backbone='backbone')[0]
    # Stem 64*3*4; pair at 4 x 4: conv1 16*9*24, conv2 16*9*48, shortcut 16*32.
    stem, conv1, conv2, shortcut, own = 768, 3_456, 6_912, 512, 20
    # Transposed: each of 16 inputs meets 2*2*8*5 weights; fc: 10 regions for 2 images.
    up, fc = 16 * 160, 10 * 24 / 2
    assert image.backbone_dense == stem + conv1 + conv2 + shortcut
    assert image.backbone_executed == stem + shortcut + own
    assert image.model_dense == image.backbone_dense + up + fc
    assert image.model_executed == image.backbone_executed + up + fc


def test_without_gates_nothing_is_saved():
    image = count_macs(nn.Conv2d(3, 4, 3), torch.rand(1, 3, 5, 5))[0]
    assert image.backbone_executed == image.backbone_dense == 9 * 9 * 3 * 4
    assert image.pruning_ratio == 0 and image.gates == () and image.masks() == {}


@pytest.mark.parametrize('family', FAMILIES)
def test_all_open_agrees_with_mmengine(family):
    backbone = MODELS.build(FAMILIES[family])
    backbone.eval()
    x = torch.rand(2, 3, 32, 48)
    with force_gates(backbone, 1.0), torch.no_grad():
        image = count_macs(backbone, x)[0]
        analyzer = FlopAnalyzer(backbone, x)
        analyzer.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        # mmengine counts one flop per MAC, over the batch.
        flops = analyzer.by_operator()
    assert image.backbone_dense == flops['conv'] / 2
    gates_own = sum(
        layer.in_features * layer.out_features
        for gate in find_gates(backbone).values()
        for layer in gate.modules()
        if isinstance(layer, nn.Linear)
    )
    assert image.backbone_executed == image.backbone_dense + gates_own
    assert gates_own == flops['linear'] / 2


@pytest.mark.parametrize('family', FAMILIES)
def test_random_masks_agree_with_a_slimmed_network(family):
    """Physically cut every gated convolution and let mmengine count it."""
    torch.manual_seed(0)
    backbone = MODELS.build(FAMILIES[family])
    backbone.eval()
    x = torch.rand(1, 3, 32, 32)
    masks = {
        name: (torch.rand(gate.channels) > 0.5).float()
        for name, gate in find_gates(backbone).items()
    }
    # A network cannot be built with no channel at all.
    for mask in masks.values():
        mask[0] = 1
    with force_gates(backbone, masks):
        image = count_macs(backbone, x)[0]

    widths = {}
    for name, site in backbone.gates.sites.items():
        width = int(masks[f'gates.{backbone.gates.name_of(name)}'].sum())
        for end in (*site.producers, *site.through):
            widths.setdefault(end.module, {})['out'] = width
        for end in site.consumers:
            widths.setdefault(end.module, {})['in'] = width
    executed = sum(
        layer.in_features * layer.out_features
        for gate in find_gates(backbone).values()
        for layer in gate.modules()
        if isinstance(layer, nn.Linear)
    )

    def count_cut(name, conv, inputs, output):
        nonlocal executed
        c_in = widths.get(name, {}).get('in', conv.in_channels)
        c_out = widths.get(name, {}).get('out', conv.out_channels)
        if conv.groups > 1:  # depthwise: one width
            c_in = c_out = widths.get(name, {}).get('out', conv.out_channels)
        cut = nn.Conv2d(
            c_in,
            c_out,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            groups=c_out if conv.groups > 1 else 1,
            bias=False,
        )
        narrow = torch.zeros(1, c_in, *inputs[0].shape[2:])
        executed += FlopAnalyzer(cut, narrow).by_operator()['conv']

    for name, module in backbone.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, i, o, name=name: count_cut(name, m, i, o))
    with torch.no_grad():
        backbone(x)
    assert image.backbone_executed == pytest.approx(executed, rel=1e-12)
    assert 0 < image.backbone_executed < image.backbone_dense
    for name, mask in masks.items():
        assert image.masks()[name].tolist() == [mask.int().tolist()]


def test_images_of_a_batch_count_as_they_do_alone():
    torch.manual_seed(0)
    backbone = gated_resnet(18, base_channels=8, stem_channels=8)
    backbone.eval()
    for gate in find_gates(backbone).values():  # half open, depending on the image
        nn.init.normal_(gate.fc2.weight, std=3)
        nn.init.zeros_(gate.fc2.bias)
    x = torch.randn(3, 3, 32, 32) * torch.tensor([0.2, 1, 4])[:, None, None, None]
    together = count_macs(backbone, x)
    alone = [count_macs(backbone, x[i : i + 1])[0] for i in range(3)]
    assert [t.backbone_executed for t in together] == [a.backbone_executed for a in alone]
    assert len({t.backbone_executed for t in together}) == 3
    assert [t.decisions for t in together] == [a.decisions for a in alone]


def test_several_passes_add_up():
    model = Detector().eval()
    tracer = MACsTracer(model, 'backbone')
    tracer.attach()
    small, large = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 8, 8)
    with force_gates(model, {'backbone.gates.1-conv1': masks([1, 0, 0, 0, 0, 0], [1] * 6)}):
        model.backbone(small)
        model.backbone(large)
        both = tracer.take(2)
        model.backbone(small)
        one = tracer.take(2)
        model.backbone(large)
        other = tracer.take(2)
    assert [image.backbone_executed for image in both] == pytest.approx(
        [(a + b).backbone_executed for a, b in zip(one, other, strict=True)]
    )
    assert both[0].masks()['backbone.gates.1-conv1'].tolist() == [[1, 0, 0, 0, 0, 0]] * 2
    assert (one[0] + other[0]).masks()['backbone.gates.1-conv1'].tolist() == [
        [1, 0, 0, 0, 0, 0]
    ] * 2
    assert tracer.take(2)[0].model_dense == 0


def test_windows_in_one_batch_belong_to_their_image():
    pair = gated_pair()
    tracer = MACsTracer(pair)
    tracer.attach()
    rows = masks([1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1] * 6, [1] * 6)
    with force_gates(pair, {'gates.conv1': rows}):
        pair(torch.rand(4, 4, 8, 8))
        first, second = tracer.take(2)
        assert first.masks()['gates.conv1'].sum() == 3 and second.masks()['gates.conv1'].sum() == 12
        assert first.backbone_dense == second.backbone_dense
        assert first.backbone_executed < second.backbone_executed
        pair(torch.rand(4, 4, 8, 8))
        with pytest.raises(RuntimeError, match='4 images in a pass over 3'):
            tracer.take(3)


def test_counting_a_model_twice_and_detaching():
    pair = gated_pair()
    tracer = MACsTracer(pair)
    tracer.attach()
    tracer.attach()
    x = torch.rand(1, 4, 8, 8)
    pair(x)
    once = tracer.take(1)[0].backbone_dense
    assert once == count_macs(pair, x)[0].backbone_dense
    tracer.detach()
    tracer.reset()
    pair(x)
    assert tracer.take(1)[0].backbone_dense == 0
    assert not hooks_on(pair)


def test_copies_of_a_watched_model_do_not_count():
    pair = gated_pair()
    x = torch.rand(1, 4, 8, 8)
    expected = count_macs(pair, x)[0].backbone_dense
    tracer = MACsTracer(pair)
    tracer.attach()
    for other in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        torch.testing.assert_close(other(x), pair(x))
        assert tracer.take(1)[0].backbone_dense == expected


def test_another_gate_kind_counts_its_own_layers():
    pair = gated_pair(dict(type='FBSGate', density=0.5))
    image = count_macs(pair, torch.rand(1, 4, 10, 12))[0]
    assert image.backbone_executed == pytest.approx((6_480 + 12_960) / 2 + 960 + 4 * 6)


def test_costs_of_a_channel():
    pair = gated_pair()
    costs = BackboneShare(pair, '')
    assert costs.per_channel() == {'gates.conv1': 0}  # it has not run
    costs.attach()
    pair(torch.rand(3, 4, 10, 12))
    assert costs.per_channel() == {'gates.conv1': (6_480 + 12_960) / 6}
    # Closing one channel really saves that.
    pair.eval()
    x = torch.rand(1, 4, 10, 12)
    with force_gates(pair, {'gates.conv1': masks([1] * 6)}):
        full = count_macs(pair, x)[0].backbone_executed
    with force_gates(pair, {'gates.conv1': masks([1] * 5 + [0])}):
        less = count_macs(pair, x)[0].backbone_executed
    assert full - less == pytest.approx((6_480 + 12_960) / 6)
    costs.detach()
    assert not hooks_on(pair)


def test_bad_models_are_named():
    model = Detector()
    with pytest.raises(ValueError, match=r"backbone='bakcbone' .*'backbone', 'up', 'fc'"):
        MACsTracer(model, 'bakcbone')

    network = nn.Sequential(nn.Conv2d(3, 4, 1))
    network.gate = BinConcreteGate(3, 4)
    with pytest.raises(ValueError, match="gate 'gate' of Sequential is on no site"):
        MACsTracer(network)

    pair = gated_pair()
    pair.conv1._forward_pre_hooks.clear()
    with pytest.raises(RuntimeError, match=r"gate 'gates.conv1' left no record"):
        count_macs(pair, torch.rand(1, 4, 8, 8))

    with pytest.raises(ValueError, match='same model'):
        ImageMACs(1, 1, 1, 1) + ImageMACs(1, 1, 1, 1, (('gate', 2),))
