# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Parameters and buffers between the layers of a site."""

import pytest
import torch
import torch.nn as nn
import torchvision
from torchvision.models.resnet import BasicBlock, Bottleneck

from fgc_mm.sites import End, Scale, find_sites, gate_sites
from fgc_mm.sites.gate import DEFAULT_GATE

STATISTICS = ('weight', 'bias', 'running_mean', 'running_var')


def norm(name, index=None):
    return {Scale(f'{name}.{entry}', 0, index) for entry in STATISTICS}


def site_of(net, name='0', example=(1, 3, 8, 8)):
    found = find_sites(net, torch.rand(example))
    return next(site for site in found.sites if site.name == name)


def test_batch_norm_and_prelu():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.PReLU(), nn.Conv2d(4, 2, 1)
    )
    site = site_of(net)
    assert set(site.scales) == norm('1') | {Scale('2.weight', 0)}
    assert site.consumers == (End('4'),)


def test_of_a_depthwise_convolution_and_of_groups():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 8, 3, groups=2),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 2, 1),
    )
    site = site_of(net)
    assert site.channels == 2
    assert set(site.scales) == norm('1', (0, 0, 1, 1)) | norm('3', (0,) * 4 + (1,) * 4)


class LayerScaled(nn.Module):
    """Per-channel factors and sums in all their shapes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.gamma = nn.Parameter(torch.rand(4))
        self.log_scale = nn.Parameter(torch.rand(1, 4))
        self.token_scale = nn.Parameter(torch.rand(5, 1))
        self.scalar = nn.Parameter(torch.rand(1))
        self.register_buffer('shift', torch.rand(4))
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x) * self.gamma.view(1, 1, -1) * (1 + self.log_scale.exp())
        return self.second((x * self.token_scale + self.shift[None]) * self.scalar)


def test_factors_in_any_shape():
    site = site_of(LayerScaled(), 'first', (1, 5, 3))
    assert set(site.scales) == {Scale('gamma', 0), Scale('log_scale', 1), Scale('shift', 0)}


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Conv2d(3, 2, 1)
        self.right = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(5)
        self.last = nn.Conv2d(5, 2, 1)

    def forward(self, x):
        return self.last(self.norm(torch.cat([self.left(x), self.right(x)], 1)))


def test_behind_a_concatenation():
    net = Joined()
    assert set(site_of(net, 'left').scales) == norm('norm', (0, 1, -1, -1, -1))
    assert set(site_of(net, 'right').scales) == norm('norm', (-1, -1, 0, 1, 2))


class Excited(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.squeeze = nn.Conv2d(4, 2, 1)
        self.excite = nn.Conv2d(2, 4, 1)
        self.slope = nn.Parameter(torch.rand(1, 4, 1, 1))
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.norm(self.conv(x))
        factor = self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu())
        return self.last(x * (factor * self.slope).sigmoid())


def test_of_squeeze_and_excitation():
    site = site_of(Excited(), 'conv')
    assert [end.module for end in site.producers] == ['conv', 'excite']
    assert set(site.scales) == norm('norm') | {Scale('slope', 1)}


def test_frozen_norms_of_torchvision():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1), torchvision.ops.FrozenBatchNorm2d(4), nn.Conv2d(4, 2, 1)
    )
    assert set(site_of(net).scales) == norm('1')


def test_norms_of_a_module_that_runs_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1))

        def forward(self, x):
            return self.body(self.body(x))

    assert set(site_of(Twice(), 'body.0').scales) == norm('body.1')


def plain():
    """As VGG: gates read what other gates have closed."""
    layers = []
    for ins, outs in ((3, 8), (8, 12), (12, 10)):
        layers += [nn.Conv2d(ins, outs, 3, 2, 1), nn.BatchNorm2d(outs), nn.ReLU()]
    linear = [nn.Linear(640, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers, nn.Flatten(), *linear)


def resnet(block, **options):
    return torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=10, **options)


# Network -> its sites, and the norms on their ways.
NETWORKS = {
    'resnet': (lambda: resnet(BasicBlock), 4, 4),
    'resnext': (lambda: resnet(Bottleneck, groups=32, width_per_group=4), 5, 9),
    'plain': (plain, 5, 3),
    'densenet': (lambda: torchvision.models.DenseNet(8, (2, 2), 16), 10, 11),
}


@pytest.mark.parametrize('name', NETWORKS)
def test_what_a_closed_channel_meets_is_irrelevant(name):
    torch.manual_seed(0)
    build, sites, norms = NETWORKS[name]
    net = build().eval()
    picture = torch.rand(1, 3, 64, 64)
    gates = gate_sites(net, find_sites(net, picture).sites, DEFAULT_GATE)
    for gate in gates.children():
        nn.init.normal_(gate.fc2.bias)
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    with torch.no_grad():
        before = net(picture)
        masks = {name: gates.of(name).record.mask for name in gates.sites}
        for site in gates.sites.values():
            open_ = masks[site.name]
            for tensor, dim, index in (
                *((f'{end.module}.weight', 0, end.index) for end in site.producers + site.through),
                *((scale.tensor, scale.dim, scale.index) for scale in site.scales),
            ):
                closed = End(tensor, index).spread(open_)[0] == 0
                entries = tensors[tensor].movedim(dim, 0)
                entries[closed] = 1 + torch.rand(entries[closed].shape)
        after = net(picture)
    assert torch.equal(before, after)
    assert 0.2 < torch.cat(list(masks.values()), 1).mean() < 0.8
    scales = {scale.tensor for site in gates.sites.values() for scale in site.scales}
    assert (len(gates.sites), len(scales)) == (sites, 4 * norms)
