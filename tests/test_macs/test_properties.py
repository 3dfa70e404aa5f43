# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""MACs of any shape and mask, against counting every single product."""

import itertools
import math

import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from fgc_mm.gates import find_gates, force_gates
from fgc_mm.macs import BackboneShare, call_macs, count_macs, open_share
from fgc_mm.nets import GatedResNetCifar

quick = settings(max_examples=60, deadline=None, derandomize=True)
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64]


def masks(batch, channels):
    row = st.lists(st.integers(0, 1), min_size=channels, max_size=channels)
    return st.lists(row, min_size=batch, max_size=batch)


def tensor(drawn, channels, dtype=torch.float32):
    return torch.tensor(drawn, dtype=dtype).reshape(len(drawn), channels)


@quick
@given(
    draw=st.data(),
    groups=st.integers(1, 3),
    ins=st.integers(1, 3),
    outs=st.integers(1, 3),
    batch=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    sides=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
)
def test_open_share_counts_the_pairs_of_open_channels(draw, groups, ins, outs, batch, dtype, sides):
    wide_in, wide_out = groups * ins, groups * outs
    in_mask = tensor(draw.draw(masks(batch, wide_in)), wide_in, dtype) if sides[0] else None
    out_mask = tensor(draw.draw(masks(batch, wide_out)), wide_out, dtype) if sides[1] else None
    share = open_share(in_mask, out_mask, groups)
    assert share.dtype == torch.float64
    assert share.shape == ((batch,) if any(sides) else (1,))
    for image in range(batch if any(sides) else 1):
        met = [
            (in_mask is None or bool(in_mask[image, i]))
            and (out_mask is None or bool(out_mask[image, o]))
            for i, o in itertools.product(range(wide_in), range(wide_out))
            if i // ins == o // outs
        ]
        assert abs(float(share[image]) - sum(met) / len(met)) < 1e-12


@quick
@given(
    groups=st.integers(1, 3),
    ins=st.integers(1, 3),
    outs=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
)
def test_conv_macs_counts_the_products_of_a_real_convolution(
    groups, ins, outs, kernel, stride, size
):
    """A convolution of ones over ones gives, in each output, the number of its products."""
    conv = nn.Conv2d(groups * ins, groups * outs, kernel, stride, groups=groups, bias=False)
    nn.init.ones_(conv.weight)
    with torch.no_grad():
        x = torch.ones(1, groups * ins, *size)
        out = conv(x)
    counted = call_macs(conv, (x,), out)
    assert isinstance(counted, int) and counted == int(out.sum())


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    number=st.integers(0, 2),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_a_picture_of_no_numbers_costs_a_number(batch, number, bad):
    """And what the other pictures cost stays the same."""
    torch.manual_seed(0)
    network = GatedResNetCifar(depth=20).eval()
    pictures = torch.rand(batch, 3, 8, 8)
    with torch.no_grad():
        expected = count_macs(network, pictures)
        pictures[number % batch, 0, 3, 3] = bad
        found = count_macs(network, pictures)
    for which, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.backbone_dense == other.backbone_dense
        assert 0 < one.backbone_executed < 2 * one.backbone_dense
        if which != number % batch:
            assert abs(one.backbone_executed - other.backbone_executed) < 1e-6 * one.backbone_dense


@settings(max_examples=15, deadline=None, derandomize=True)
@given(draw=st.data(), batch=st.integers(1, 3), size=st.integers(8, 17))
def test_a_network_under_any_masks(draw, batch, size):
    """All channels closed, all open, equal images, one image: layer by layer, image by image."""
    torch.manual_seed(0)
    network = GatedResNetCifar(depth=20, gated_blocks=['layer1.0', 'layer3.2']).eval()
    gates = find_gates(network)
    chosen = {
        name: tensor(draw.draw(masks(batch, 1)), 1).repeat(1, gate.channels)
        for name, gate in gates.items()
    }
    for name, mask in chosen.items():
        first = draw.draw(st.integers(0, gates[name].channels))
        mask[:, :first] = 1 - mask[:, :first]
    share = BackboneShare(network, '')
    share.attach()
    with force_gates(network, chosen), torch.no_grad():
        images = count_macs(network, torch.rand(batch, 3, size, size))
    openness = torch.stack([chosen[name].mean(dim=1) for name in share.gates], dim=1)
    shares = share.of(openness.double())
    for number, image in enumerate(images):
        executed = dense = 0
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear):  # of gates alone: the backbone has none
                executed += layer.in_features * layer.out_features
            if not isinstance(layer, nn.Conv2d):
                continue
            macs = share._macs[name]
            block, _, conv = name.rpartition('.')
            mask = chosen.get(f'gates.{block.replace(".", "-")}-conv1')
            gated = mask is not None and conv in ('conv1', 'conv2')
            dense += macs
            executed += macs * (float(mask[number].mean()) if gated else 1.0)
        assert image.backbone_dense == dense
        assert abs(image.backbone_executed - executed) < 1e-6 * dense
        assert abs(float(shares[number]) - executed / dense) < 1e-6
