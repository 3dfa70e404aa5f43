# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Custom functions of autograd, which may compute past the dispatcher."""

import pytest
import torch
import torch.nn as nn

from fgc_mm.sites import find_sites


class Past(torch.autograd.Function):
    """Writes its output by NumPy, as an extension in C++ does: nobody sees an operation."""

    @staticmethod
    def forward(ctx, x):
        out = x.new_zeros(x.shape)
        out.numpy()[:] = x.numpy()[:, ::-1]
        return out


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1)
        self.way = way

    def forward(self, x):
        return self.way(self.first(x), x, self.second)


WAYS = {
    'read beside a layer': (lambda y, x, last: (last(y), Past.apply(y)), 'the operation Past'),
    'read before a layer': (lambda y, x, last: last(Past.apply(y)), 'the operation Past'),
    'added': (lambda y, x, last: last(y + Past.apply(x)), 'added to another tensor'),
}


@pytest.mark.parametrize('name', WAYS)
def test_what_a_custom_function_reads_is_seen(name):
    way, reason = WAYS[name]
    own = vars(Past)['forward']
    found = find_sites(Net(way), torch.rand(1, 3, 4, 4))
    assert not found.sites
    assert reason in {refusal.name: refusal.reason for refusal in found.refused}['first']
    assert vars(Past)['forward'] is own


def test_other_layers_are_sites_all_the_same():
    net = Net(lambda y, x, last: (last(y.relu()), Past.apply(x)))
    assert [site.name for site in find_sites(net, torch.rand(1, 3, 4, 4)).sites] == ['first']


def test_deformable_convolutions():
    deform = pytest.importorskip('mmcv.ops').ModulatedDeformConv2dPack
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), deform(8, 8, 3), nn.Conv2d(8, 4, 1))
    found = find_sites(net, torch.rand(1, 3, 8, 8))
    assert not found.sites
    reasons = {refusal.name: refusal.reason for refusal in found.refused}
    assert 'the operation ModulatedDeformConv2dFunction' in reasons['0']
