# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Narrowed networks compute what masked ones do."""

import copy

import numpy as np
import pytest
import torch
import torch.nn as nn
import torchvision
from mmengine.registry import MODELS
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock, Bottleneck

import fgc_mm  # noqa: F401
from fgc_mm.errors import UsageError
from fgc_mm.gates import force_gates
from fgc_mm.sites import find_sites, gate_sites
from fgc_mm.sites.forward_hooks import remove_gates
from fgc_mm.sites.gate import DEFAULT_GATE
from fgc_mm.sites.narrow import narrow

PICTURE = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))


def resnet(block, **options):
    return torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=10, **options)


def mobilenet_v3():
    settings = [(16, 3, 16, 16, True, 'RE', 2, 1), (16, 5, 72, 24, True, 'HS', 2, 1)]
    layers = [InvertedResidualConfig(*row, 1.0) for row in settings]
    return torchvision.models.MobileNetV3(layers, 32, 10)


def vgg():
    """Gates read what other gates closed, and linear layers stand behind a flatten."""
    layers = []
    for ins, outs in ((3, 8), (8, 12), (12, 10)):
        layers += [nn.Conv2d(ins, outs, 3, 2, 1), nn.BatchNorm2d(outs), nn.PReLU(outs)]
    linear = [nn.Linear(640, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers, nn.Flatten(), *linear)


def registered(kind, **options):
    return MODELS.build(dict(type=kind, **options))


def convnext():
    arch = dict(depths=[1, 1, 1, 1], channels=[8, 16, 24, 32])
    return registered('mmpretrain.ConvNeXt', arch=arch, layer_scale_init_value=0.5)


def swin():
    arch = dict(embed_dims=24, depths=[2, 2], num_heads=[2, 4])
    return registered(
        'mmpretrain.SwinTransformer', arch=arch, img_size=64, window_size=4, out_indices=(1,)
    )


def csp():
    stages = [[64, 128, 1, True, False], [128, 256, 1, False, False]]
    return registered('mmdet.CSPNeXt', arch_ovewrite=stages, widen_factor=0.25, out_indices=(1, 2))


def seresnet():
    one = dict(num_stages=1, strides=(1,), dilations=(1,), out_indices=(0,))
    return registered('mmpretrain.SEResNet', depth=50, base_channels=16, **one)


# Network -> how many sites it has.
NETWORKS = {
    'resnet': (lambda: resnet(BasicBlock), 4),
    'bottlenecks': (lambda: resnet(Bottleneck), 9),
    'resnext': (lambda: resnet(Bottleneck, groups=8, width_per_group=8), 5),
    'mobilenet_v3': (mobilenet_v3, 8),
    'vgg': (vgg, 5),
    'densenet': (lambda: torchvision.models.DenseNet(8, (2, 2), 16), 10),
    'csp': (csp, 11),
    'convnext': (convnext, 4),
    'swin': (swin, 4),
    'seresnet': (seresnet, 9),
}


def build(name):
    torch.manual_seed(0)
    net = NETWORKS[name][0]()
    net.eval()  # returns nothing in mmdet
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.normal_(module.running_mean)
            nn.init.normal_(module.bias)
    return net


def outputs(net, x):
    out = net(x)
    return out if isinstance(out, (list, tuple)) else (out,)


def assert_close(outs, wanted):
    for out, want in zip(outs, wanted, strict=True):
        assert want.std() > 0
        torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize('name', NETWORKS)
@torch.no_grad()
def test_narrowed_is_masked(name):
    net = build(name)
    sites = find_sites(net, PICTURE).sites
    assert len(sites) == NETWORKS[name][1]
    masks = {site.name: torch.rand(site.channels) > 0.4 for site in sites}
    for number, mask in enumerate(masks.values()):
        mask[0] = mask[0] | (number % 3 == 0)
        if not mask.any() or number % 5 == 4:  # a single channel
            mask[:] = False
            mask[-1] = True
    gated = copy.deepcopy(net)
    gates = gate_sites(gated, sites, DEFAULT_GATE)
    forced = {gates.name_of(site): mask.float() for site, mask in masks.items()}
    with force_gates(gates, forced):
        wanted = outputs(gated, PICTURE)
    left, refused = narrow(net, sites, masks, PICTURE)
    assert refused == {}
    assert_close(outputs(net, PICTURE), wanted)
    assert [site.channels for site in left] == [int(mask.sum()) for mask in masks.values()]
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            assert layer.weight.shape == (layer.out_features, layer.in_features)
        if isinstance(layer, nn.Conv2d):
            ins, outs = layer.in_channels // layer.groups, layer.out_channels
            assert layer.weight.shape[:2] == (outs, ins)
    # What is left can be gated, and narrowed again.
    gates = gate_sites(net, left, DEFAULT_GATE)
    with force_gates(gates, 1.0):
        assert_close(outputs(net, PICTURE), wanted)
    remove_gates(net)
    halves = {site.name: max(1, site.channels // 2) for site in left}
    left, refused = narrow(net, left, halves, PICTURE)
    assert refused == {} and {site.name: site.channels for site in left} == halves


class Shuffled(nn.Module):
    """Its shuffle has a fixed number of channels in a view."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels
        self.first = nn.Conv2d(3, 8, 1)
        self.second = nn.Conv2d(8, 8, 1)
        self.third = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.second(self.first(x))
        channels = self.channels or x.size(1)
        x = x.view(x.size(0), 2, channels // 2, *x.shape[2:]).transpose(1, 2)
        return self.third(x.reshape(x.size(0), channels, *x.shape[3:]))


@pytest.mark.parametrize(
    ('channels', 'reason'), [(8, 'it does not run'), (0, 'other ones of second reach')]
)
@torch.no_grad()
def test_a_shuffle_is_left_alone(channels, reason):
    net = Shuffled(channels)
    sites = find_sites(net, PICTURE).sites
    kept = {'first': [1, 2, 5], 'second': [0, 1, 2, 5]}
    gated = copy.deepcopy(net)
    gates = gate_sites(gated, sites[:1], DEFAULT_GATE)
    with force_gates(gates, {'first': torch.tensor([0.0, 1, 1, 0, 0, 1, 0, 0])}):
        wanted = outputs(gated, PICTURE)
    left, refused = narrow(net, sites, kept, PICTURE)
    assert list(refused) == ['second'] and reason in refused['second']
    assert [site.channels for site in left] == [3, 8]
    assert_close(outputs(net, PICTURE), wanted)


class Grouped(nn.Module):
    """A layer in groups reads the channels and gives what something is added to."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.grouped = nn.Conv2d(8, 4, 1, groups=4)
        self.side = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.grouped(self.first(x)) + self.side(x)


def test_what_cannot_be_narrowed_is_said():
    net = Grouped()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    sites = find_sites(net, PICTURE).sites
    assert [site.channels for site in sites] == [4]
    left, refused = narrow(net, sites, {'first': [0, 2]}, PICTURE)
    assert 'grouped reads it in groups' in refused['first']
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])
    assert left == sites


@pytest.mark.parametrize(
    'kept', [0, 9, [], [8], [-1], torch.ones(3, dtype=bool), np.zeros(8, bool)]
)
def test_what_is_to_stay_must_be_there(kept):
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1))
    sites = find_sites(net, PICTURE).sites
    with pytest.raises(UsageError, match=r"site '0' has 8 channels to switch: .* from 1 to 8"):
        narrow(net, sites, {'0': kept}, PICTURE)
    with pytest.raises(UsageError, match="'1' is no site; there are 0"):
        narrow(net, sites, {'1': 4}, PICTURE)


@torch.no_grad()
def test_without_its_gates_it_is_as_before():
    net = build('resnet')
    wanted = net(PICTURE)
    keys = list(net.state_dict())
    gates = gate_sites(net, find_sites(net, PICTURE).sites, DEFAULT_GATE)
    with force_gates(gates, 0.0):
        assert not torch.equal(net(PICTURE), wanted)
    remove_gates(net)
    assert torch.equal(net(PICTURE), wanted) and list(net.state_dict()) == keys
    assert not any(module._forward_pre_hooks for module in net.modules())
