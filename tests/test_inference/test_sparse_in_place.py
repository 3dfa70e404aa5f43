# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Shortcuts are overwritten where nobody else needs them, and only there."""

import copy

import pytest
import torch
from mmengine.model import Sequential
from sparse_networks import assert_equal_outputs, build, pictures

from fgc_mm.inference import convolution, enable_sparse, kernels
from fgc_mm.inference.folding import FoldedLayer
from fgc_mm.nets import GatedResNet

pytestmark = pytest.mark.usefixtures('without_gradients')


@pytest.fixture
def spent(monkeypatch):
    """How many shortcuts were overwritten by which way; a turned convolution leaves them."""
    counts = dict(accumulate=0, multiply=0)
    monkeypatch.setattr(FoldedLayer, 'turns', lambda *_: False)
    accumulate, multiply = kernels.accumulate, convolution._multiply

    def counting(*args):
        counts['accumulate'] += 1
        return accumulate(*args)

    def multiplying(x, weight, bias, plus, *others):
        out = multiply(x, weight, bias, plus, *others)
        counts['multiply'] += plus is not None and out.data_ptr() == plus.data_ptr()
        return out

    monkeypatch.setattr(kernels, 'accumulate', counting)
    monkeypatch.setattr(convolution, '_multiply', multiplying)
    return counts


def every(counts):
    return sum(counts.values())


def blocks_of(model):
    return [block for name in model.res_layers for block in getattr(model, name)]


@pytest.mark.parametrize('way', ['dense', 'union'])
@pytest.mark.parametrize('size', [(40, 24), (640, 512)])
@pytest.mark.parametrize('family', ['basic', 'bottleneck'])
def test_all_outputs_stay_and_so_does_the_input(family, size, way, spent):
    """Also where maps are so large that pointwise convolutions are no products."""
    model = build(family)
    x = pictures(1, size).contiguous(memory_format=torch.channels_last)
    before, wanted = x.clone(), model(x)
    outs = enable_sparse(model, way=way)(x)
    assert torch.equal(x, before)
    assert_equal_outputs(outs, wanted)
    if kernels._ACCUMULATE is not None:
        kept = [b for b in blocks_of(model) if not b.runner.owns_input and b.downsample is None]
        assert not kept  # each stage but the first begins with a convolution in its shortcut
        assert every(spent) == len(blocks_of(model))


def test_a_stage_that_is_returned_is_not_overwritten(spent):
    """Without a convolution in the shortcut the next stage begins with the output."""
    model = build(num_stages=2, strides=(1, 1), dilations=(1, 1), out_indices=(0, 1))
    model.layer2 = Sequential(copy.deepcopy(model.layer1[1]))
    x = pictures(1)
    wanted = model(x)
    assert_equal_outputs(enable_sparse(model)(x), wanted)
    assert not model.layer2[0].runner.owns_input


class KeepsMaps(GatedResNet):
    def forward(self, x):
        x = self.maxpool(self.relu(self.norm1(self.conv1(x))))
        maps = []
        for name in self.res_layers:
            for block in getattr(self, name):
                x = block(x)
                maps.append(x)
        return tuple(maps)


def test_maps_a_subclass_keeps_are_left_alone(spent):
    plain = build('basic')
    model = KeepsMaps(18, base_channels=8).eval()
    model.load_state_dict(plain.state_dict())
    x = pictures(1)
    wanted = model(x)
    assert_equal_outputs(enable_sparse(model)(x), wanted)
    shortcuts = [b for b in blocks_of(model) if b.downsample is not None]
    assert kernels._ACCUMULATE is None or every(spent) == len(shortcuts)


def test_maps_hooks_keep_are_left_alone(spent):
    model, x, kept = build('bottleneck'), pictures(1), []
    for block in blocks_of(model):
        block.register_forward_hook(lambda module, args, out: kept.append(out))
    model(x)
    wanted, kept[:] = list(kept), []
    enable_sparse(model)(x)
    assert_equal_outputs(kept, wanted)
    assert every(spent) == 0


def test_a_block_alone_leaves_its_input(spent):
    model = enable_sparse(build('basic'))
    x = pictures(1)
    model(x)
    spent.update(accumulate=0, multiply=0)
    maps = torch.rand(1, 8, 12, 12).contiguous(memory_format=torch.channels_last)
    before = maps.clone()
    model.layer1[1](maps)
    assert torch.equal(maps, before)
    assert every(spent) == 0
