# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The pure functions, against numbers worked out by hand and literal loops."""

import pytest
import torch
import torch.nn as nn

from fgc_mm.macs import call_macs, open_share
from fgc_mm.macs.formulas import is_counted

CALLS = {
    # The stem of a ResNet at 224 px.
    'stem': (nn.Conv2d(3, 64, 7, 2, 3), (1, 3, 224, 224), 112 * 112 * 7 * 7 * 3 * 64),
    # Each of 32 channels meets itself only.
    'depthwise': (nn.Conv2d(32, 32, 3, groups=32), (1, 32, 12, 12), 10 * 10 * 9 * 32),
    # Two groups of 4 -> 6.
    'groups': (nn.Conv2d(8, 12, 1, groups=2), (3, 8, 5, 7), 3 * 5 * 7 * 2 * 4 * 6),
    'no batch': (nn.Conv2d(3, 4, 1), (3, 5, 5), 5 * 5 * 3 * 4),
    # Each input meets the whole kernel.
    'transposed': (nn.ConvTranspose2d(3, 4, 2, 2), (1, 3, 5, 6), 5 * 6 * 3 * 2 * 2 * 4),
    'linear': (nn.Linear(512, 1000), (1, 512), 512_000),
    'tokens': (nn.Linear(3, 5), (2, 7, 3), 2 * 7 * 3 * 5),
}


@pytest.mark.parametrize('name', CALLS)
def test_macs_of_a_call_by_hand(name):
    layer, shape, expected = CALLS[name]
    x = torch.rand(shape)
    assert is_counted(layer) and call_macs(layer, (x,), layer(x)) == expected


def test_open_share_is_the_product_of_both_sides():
    in_mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]])
    out_mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert open_share(in_mask, out_mask).tolist() == pytest.approx([1 / 4 * 2 / 3, 0])
    assert open_share(in_mask, None).tolist() == [0.25, 0.75]
    assert open_share(None, out_mask).tolist() == pytest.approx([2 / 3, 0])
    assert open_share().tolist() == [1.0]


def test_depthwise_channel_counts_once():
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0]])
    assert open_share(mask, mask, groups=4).tolist() == [0.5, 0.75]


@pytest.mark.parametrize('groups', [1, 2, 3, 6])
def test_open_share_counts_what_a_loop_counts(groups):
    generator = torch.Generator().manual_seed(0)
    c_in, c_out = 6, 12
    in_mask = torch.rand(5, c_in, generator=generator) > 0.4
    out_mask = torch.rand(5, c_out, generator=generator) > 0.5
    expected = []
    for i in range(5):
        alive = 0
        for o in range(c_out):
            for c in range(c_in):
                same_group = o // (c_out // groups) == c // (c_in // groups)
                alive += same_group and bool(in_mask[i, c]) and bool(out_mask[i, o])
        expected.append(alive / (c_out * c_in // groups))
    assert open_share(in_mask, out_mask, groups).tolist() == pytest.approx(expected)
