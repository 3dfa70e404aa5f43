# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sides of layers that follow gates, on numbers worked out by hand."""

import pytest
import torch
import torch.nn as nn

import fgc_mm
from fgc_mm.gates import find_gates, force_gates
from fgc_mm.macs import BackboneShare, Side, count_macs, switches_of
from fgc_mm.sites import End


def test_a_side_that_follows_two_gates():
    side = Side(5, [('a', End('conv', (0, 1, 0, -1, -1))), ('b', End('conv', (-1, 0, 1, 1, -1)))])
    masks = {'a': torch.tensor([[1.0, 0.0]]), 'b': torch.tensor([[1.0, 0.0]])}
    # Channel 1 is closed by a, 2 and 3 by b, 4 follows nobody.
    assert side.mask(masks).tolist() == [[1, 0, 0, 0, 1]]
    assert side.parts() == {('a',): 0.2, ('a', 'b'): 0.4, ('b',): 0.2, (): 0.2}
    assert Side(3).mask({}) is None and Side(3).parts() == {(): 1}


class Branches(nn.Module):
    """Two layers whose outputs a third one reads side by side."""

    def __init__(self):
        super().__init__()
        self.left = nn.Conv2d(3, 4, 1, bias=False)
        self.right = nn.Conv2d(3, 8, 1, bias=False)
        self.last = nn.Conv2d(12, 5, 1, bias=False)

    def forward(self, x):
        return self.last(torch.cat([self.left(x).relu(), self.right(x).relu()], dim=1))


@pytest.fixture
def branches():
    torch.manual_seed(0)
    return fgc_mm.gate(Branches(), torch.rand(1, 3, 4, 4), sites=['left', 'right']).eval()


def test_counted_by_hand(branches):
    """16 positions; the gates read 3 channels, have 16 hidden ones and decide over 4 and 8."""
    assert set(switches_of(branches)) == {'left', 'right', 'last'}
    own = 3 * 16 + 16 * 4 + 3 * 16 + 16 * 8
    masks = {'gates.left': [1, 0, 0, 0], 'gates.right': [1, 1, 1, 1, 1, 1, 0, 0]}
    masks = {name: torch.tensor(mask).float() for name, mask in masks.items()}
    with force_gates(branches, masks):
        (image,) = count_macs(branches, torch.rand(1, 3, 4, 4))
    assert image.model_dense == 16 * (3 * 4 + 3 * 8 + 12 * 5)
    assert image.model_executed == pytest.approx(16 * (3 * 1 + 3 * 6 + 7 * 5) + own)
    assert {name: mask.tolist() for name, mask in image.masks().items()} == {
        name: [mask.tolist()] for name, mask in masks.items()
    }


def test_the_share_is_that_of_evaluation(branches):
    share = BackboneShare(branches, '')
    share.attach()
    branches(torch.rand(2, 3, 4, 4))
    openness = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    dense = 16 * (3 * 4 + 3 * 8 + 12 * 5)
    own = 3 * 16 + 16 * 4 + 3 * 16 + 16 * 8
    executed = [16 * (3 + 18 + 35) + own, 16 * (12 + 0 + 20) + own]
    assert share.of(openness).tolist() == pytest.approx([e / dense for e in executed])
    assert share.per_channel() == pytest.approx(
        {'gates.left': 16 * (3 + 5), 'gates.right': 16 * (3 + 5)}
    )
    share.detach()
    assert list(find_gates(branches)) == list(share.gates)


class Levels(nn.Module):
    """A head that is shared by two levels."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Conv2d(3, 4, 1, bias=False)
        self.scores = nn.Conv2d(4, 2, 1, bias=False)

    def forward(self, x):
        return [self.scores(self.tower(level).relu()) for level in (x, x[..., ::2, ::2])]


def test_every_call_is_counted_under_its_own_decision():
    torch.manual_seed(0)
    net = fgc_mm.gate(Levels(), torch.rand(1, 3, 4, 4), sites=['tower']).eval()
    (site,) = net.gates.sites.values()
    assert site.calls == 2 and site.source == 'tower'
    gate = net.gates.of('tower')
    with torch.no_grad():  # open where the mean is high
        gate.fc1.weight.fill_(1.0)
        gate.norm = nn.Identity()
        gate.fc2.weight.fill_(1.0)
        gate.fc2.bias.copy_(torch.tensor([9.0, 9.0, -20.0, -20.0]))
    x = torch.zeros(1, 3, 4, 4)
    x[..., ::2, ::2] = 1.0  # the small level is all ones, the large one has a mean of a quarter
    (image,) = count_macs(net, x)
    assert image.masks()['gates.tower'].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    own = 2 * (3 * 16 + 16 * 4)
    assert image.model_dense == (16 + 4) * (3 * 4 + 4 * 2)
    assert image.model_executed == pytest.approx(16 * (3 * 2 + 2 * 2) + 4 * (3 * 4 + 4 * 2) + own)
