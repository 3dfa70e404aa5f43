# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The pure functions, against numbers worked out by hand and literal loops."""

import pytest
import torch

from fgc_mm.macs import conv_macs, linear_macs, open_share


def test_conv_macs_by_hand():
    # The stem of a ResNet at 224 px: 112 * 112 * 7 * 7 * 3 * 64.
    assert conv_macs(3, 64, (7, 7), (112, 112)) == 118_013_952
    # Depthwise: each of 32 channels meets itself only, 10 * 10 * 9 * 32.
    assert conv_macs(32, 32, (3, 3), (10, 10), groups=32) == 28_800
    # Two groups of 4 -> 6: 5 * 7 * 1 * 2 * (4 * 6).
    assert conv_macs(8, 12, (1, 1), (5, 7), groups=2) == 1_680


def test_linear_macs_by_hand():
    assert linear_macs(512, 1000) == 512_000
    assert linear_macs(3, 5, rows=7) == 105


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
