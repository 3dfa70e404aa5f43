# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What sites are worth, against networks that are cut by hand."""

import pytest
import torch
import torch.nn as nn
from mmengine.analysis import FlopAnalyzer

from fgc_mm.macs import layer_macs, share_left, share_touched
from fgc_mm.sites import find_sites


class Net(nn.Module):
    """Two branches side by side, a depthwise layer, a shortcut."""

    def __init__(self, left=8, right=4, inner=8):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.left = nn.Conv2d(6, left, 1)
        self.right = nn.Conv2d(6, right, 1)
        self.join = nn.Conv2d(left + right, 6, 3, padding=1, stride=2)
        self.short = nn.Conv2d(6, 6, 1, stride=2)
        self.wide = nn.Conv2d(6, inner, 1)
        self.deep = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.narrow = nn.Conv2d(inner, 5, 1)

    def forward(self, x):
        x = self.stem(x)
        y = torch.cat([self.left(x).relu(), self.right(x).relu()], dim=1)
        x = self.join(y) + self.short(x) + x.mean()
        return self.narrow(self.deep(self.wide(x).relu()).relu())


PICTURE = torch.rand(1, 3, 12, 10)


def flops(net):
    return FlopAnalyzer(net, PICTURE).unsupported_ops_warnings(False).by_operator()['conv']


@pytest.fixture(scope='module')
def measured():
    net = Net()
    sites = {site.name: site for site in find_sites(net, PICTURE).sites}
    assert set(sites) == {'left', 'right', 'wide'}
    return net, sites, layer_macs(net, PICTURE)


def test_layers_are_counted_as_mmengine_does(measured):
    net, _, macs = measured
    analyzer = FlopAnalyzer(net, PICTURE).unsupported_ops_warnings(False)
    theirs = analyzer.by_module_and_operator()
    assert macs == {name: theirs[name]['conv'] for name, _ in net.named_children()}
    assert sum(macs.values()) == flops(net)


def test_half_open_is_a_network_of_half_the_channels(measured):
    net, sites, macs = measured
    total = flops(net)
    cuts = {'left': dict(left=4), 'right': dict(right=2), 'wide': dict(inner=4)}
    for name, cut in cuts.items():
        assert share_left([sites[name]], net, macs) == pytest.approx(flops(Net(**cut)) / total)
    everything = flops(Net(left=4, right=2, inner=4)) / total
    assert share_left(sites.values(), net, macs) == pytest.approx(everything)
    quarter = flops(Net(left=2, right=1, inner=2)) / total
    assert share_left(sites.values(), net, macs, 0.25) == pytest.approx(quarter)
    assert share_left(sites.values(), net, macs, 1.0) == pytest.approx(1)
    assert share_left([], net, macs) == 1


def test_what_a_site_touches_is_gone_if_it_is_closed(measured):
    net, sites, macs = measured
    total = sum(macs.values())
    assert share_touched([sites['wide']], net, macs) == pytest.approx(
        (macs['wide'] + macs['deep'] + macs['narrow']) / total
    )
    # Two thirds of what is joined are of the left branch.
    left = macs['left'] + macs['join'] * 8 / 12
    assert share_touched([sites['left']], net, macs) == pytest.approx(left / total)
    untouched = macs['stem'] + macs['short']
    assert share_touched(sites.values(), net, macs) == pytest.approx(1 - untouched / total)


def test_the_table_of_known_backbones():
    """As they are published: the part that sites touch, and what is left if each is half open."""
    models = pytest.importorskip('torchvision').models
    for build, count, touched, left in (
        (models.resnet18, 8, 92, 54),
        (models.vgg16_bn, 12, 100, 26),
    ):
        net = build(num_classes=4).eval()
        if hasattr(net, 'classifier'):
            net.avgpool, net.classifier = nn.Identity(), nn.Identity()
        found = find_sites(net, torch.rand(1, 3, 64, 64))
        macs = layer_macs(net, torch.rand(1, 3, 224, 224))
        assert len(found.sites) == count
        assert round(100 * share_touched(found.sites, net, macs)) == touched
        assert round(100 * share_left(found.sites, net, macs)) == left
