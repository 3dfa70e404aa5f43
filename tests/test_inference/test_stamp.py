# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a stamp notices of writes that leave no trace in version counters."""

import pytest
import torch
import torch.nn as nn

from fgc_mm.inference.stamp import Stamp

SHAPES = [(64, 64, 3), (64, 256, 1), (256, 64, 1), (12, 30, 3), (30, 12, 1), (64, 3, 7), (1, 5, 3)]


def stamp_of(*modules):
    kinds = [(m._parameters, m._buffers) for m in modules]
    return Stamp([(owner, key) for pair in kinds for owner in pair for key in owner])


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_every_channel_of_a_convolution_is_watched(shape, dtype, layout):
    outs, ins, kernel = shape
    conv = nn.Conv2d(ins, outs, kernel).to(dtype).to(memory_format=layout)
    stamp, weight = stamp_of(conv), conv.weight.data
    for values in [*weight.unbind(0), *weight.unbind(1), *conv.bias.data.unbind(0)]:
        before = values.clone()
        assert stamp.holds()
        values.add_(1)
        assert not stamp.holds()
        values.copy_(before)
    assert stamp.holds()


def test_samples_of_a_convolution_are_few():
    for outs, ins, kernel in [(512, 512, 3), (512, 2048, 1), (2048, 512, 1), (64, 3, 7)]:
        conv = nn.Conv2d(ins, outs, kernel, bias=False)
        stamp = stamp_of(conv)
        samples = sum(len(view) for view in (*stamp._spread, *stamp._whole))
        assert max(outs, ins) <= samples <= 1.5 * max(outs, ins)


def test_every_value_of_other_layers_is_watched():
    linear, norm = nn.Linear(7, 5), nn.BatchNorm2d(6)
    stamp = stamp_of(linear, norm)
    for tensor in (linear.weight, linear.bias, norm.weight, norm.running_var):
        for value in tensor.data.flatten().unbind():
            before = value.clone()
            value.add_(1)
            assert not stamp.holds()
            value.copy_(before)
            assert stamp.holds()


def test_the_last_value_of_a_large_layer_is_watched():
    linear = nn.Linear(2048, 16)
    stamp = stamp_of(linear)
    linear.weight.data[15, 2047] += 1
    assert not stamp.holds()


def test_not_a_number_is_itself():
    conv = nn.Conv2d(3, 4, 1)
    conv.weight.data.fill_(float('nan'))
    assert stamp_of(conv).holds()


def test_writes_and_replacements():
    conv = nn.Conv2d(3, 4, 3)
    stamp = stamp_of(conv)
    with torch.no_grad():
        conv.weight[0, 0, 0, 0] += 1  # not sampled, but counted
    assert not stamp.holds()
    stamp = stamp_of(conv)
    conv.weight = nn.Parameter(conv.weight.detach())
    assert not stamp.holds()
    stamp = stamp_of(conv)
    conv.weight.data = conv.weight.data.clone()
    assert not stamp.holds()
    stamp = stamp_of(conv)
    conv.bias = None
    assert not stamp.holds()
