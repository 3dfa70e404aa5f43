# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Convolutions that are run as the transposed convolution with the same result."""

import pytest
import torch
import torch.nn as nn
from sparse_networks import assert_equal_outputs, build, pictures

from fgc_mm.inference import enable_sparse, kernels
from fgc_mm.inference.folding import FoldedLayer
from fgc_mm.inference.stamp import checks

pytestmark = [
    pytest.mark.usefixtures('without_gradients'),
    pytest.mark.skipif(kernels._TURN is None, reason='PyTorch was built without oneDNN'),
]


@pytest.fixture
def turned(monkeypatch):
    """The convolutions that were turned."""
    convs, run = [], FoldedLayer.run_turned

    def noting(layer, *args):
        convs.append(layer.conv)
        return run(layer, *args)

    monkeypatch.setattr(FoldedLayer, 'run_turned', noting)
    return convs


@pytest.fixture
def checked(monkeypatch):
    """As inside a pass whose weights were looked at."""
    monkeypatch.setattr(checks, 'done', True)


@pytest.mark.parametrize('relu', [False, True])
@pytest.mark.parametrize('plus', [False, True])
@pytest.mark.parametrize(
    'shape',
    [
        dict(kernel_size=3, padding=1),
        dict(kernel_size=3, padding=0),
        dict(kernel_size=3, padding=2, dilation=2),
        dict(kernel_size=(3, 1), padding=(1, 0)),
        dict(kernel_size=5, padding=2, bias=False),
    ],
)
def test_some_inputs_with_all_outputs(shape, plus, relu, checked):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(12, 20, **shape), nn.BatchNorm2d(20).eval()
    nn.init.uniform_(norm.running_mean)
    columns = torch.tensor([0, 3, 4, 11, 7])
    x = torch.randn(2, 5, 9, 11).contiguous(memory_format=torch.channels_last)
    full = torch.zeros(2, 12, 9, 11)
    full[:, columns] = x
    wanted = norm(conv(full))
    more = torch.randn_like(wanted)
    layer = FoldedLayer(conv, norm, channels_last=True)
    assert kernels.turns(conv)
    before = more.clone()
    out = layer.run_turned(x, columns, relu, more if plus else None)
    wanted = wanted + more if plus else wanted
    wanted = wanted.relu() if relu else wanted
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(more, before)


@pytest.mark.parametrize(
    'conv',
    [
        nn.Conv2d(8, 8, 3, padding=1, stride=2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 8, 3, padding='same'),
        nn.Conv2d(8, 8, 3, padding=3),
        nn.Conv2d(8, 8, 1),
    ],
)
def test_what_is_not_turned(conv):
    assert not kernels.turns(conv)


@pytest.mark.parametrize('granularity', [1, 4])
@pytest.mark.parametrize('family', ['basic', 'cifar', 'wide'])
def test_only_where_there_is_much_to_gather(family, granularity, turned):
    model = build(family)
    for size, some in (((32, 32), True), ((256, 256), family == 'basic')):
        x = pictures(1, size)
        wanted = model(x)
        enable_sparse(model, way='union', granularity=granularity)
        assert_equal_outputs(model(x), wanted)
        assert bool(turned) == some
        assert all(conv.kernel_size == (3, 3) for conv in turned)
        turned.clear()


def test_changed_weights_are_turned_anew(turned):
    model = enable_sparse(build('basic'), way='union')
    x = pictures(1)
    model(x)
    turned[0].weight.mul_(1.5)
    wanted = build('basic')
    wanted.load_state_dict(model.state_dict())
    assert_equal_outputs(model(x), wanted(x))
