# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The usual case of sparse execution: which blocks take it, and that it computes the same."""

import pytest
import torch
from sparse_networks import assert_equal_outputs, build, pictures

from fgc_mm.gates import find_gates
from fgc_mm.inference import enable_sparse, kernels, quick
from fgc_mm.inference.plan import Planner
from fgc_mm.macs import count_macs

CAN = pytest.mark.skipif(
    not kernels.fits(torch.zeros(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)),
    reason='this build of PyTorch has no oneDNN kernels',
)


@pytest.fixture
def gathers(monkeypatch):
    """Lets every block gather, however small its maps are, and counts quick passes."""
    monkeypatch.setattr(Planner, '_pays', lambda *args: True)
    seen = []
    run = quick.QuickConv.run

    def counted(self, x, rows, columns, *rest):
        seen.append((self, rows is not None, columns is not None))
        return run(self, x, rows, columns, *rest)

    monkeypatch.setattr(quick.QuickConv, 'run', counted)
    return seen


def check(model, x, gathers, passes=3):
    """Compare a network with itself in masked execution, image by image."""
    with torch.no_grad():
        wanted = [[out.clone() for out in model(image)] for image in x.split(1)]
        enable_sparse(model)
        for _ in range(passes):
            for image, want in zip(x.split(1), wanted, strict=True):
                assert_equal_outputs(model(image), want)
    return {(rows, columns) for _, rows, columns in gathers}


@CAN
@pytest.mark.parametrize('products', [0, 1 << 20])
@pytest.mark.parametrize('turns', [True, False])
@pytest.mark.parametrize('family', ['cifar', 'wide', 'basic', 'bottleneck'])
def test_outputs_are_those_of_masks(family, turns, products, gathers, monkeypatch):
    for name in ('PRODUCT_POSITIONS', 'SUM_POSITIONS'):
        monkeypatch.setattr(quick, name, products)
    if not turns:
        monkeypatch.setattr(kernels, 'turns', lambda conv: False)
    kinds = check(build(family), pictures(3), gathers)
    assert (True, False) in kinds and (False, True) in kinds
    assert ((True, True) in kinds) == (family == 'bottleneck')


@CAN
@pytest.mark.parametrize(
    'options',
    [
        dict(style='caffe'),
        dict(type='GatedResNet'),
        dict(strides=(1, 2), dilations=(1, 1)),
        dict(gated_convs=['conv2']),
        dict(gated_convs=['conv1']),
    ],
    ids=str,
)
def test_variants_of_bottlenecks(options, gathers):
    check(build('bottleneck', **options), pictures(2, (37, 30)), gathers)
    assert gathers


@CAN
@pytest.mark.parametrize('opened', [0, 1, 5, 8])
def test_few_and_many_channels(opened, gathers):
    model = build()
    for number, gate in enumerate(find_gates(model).values()):
        order = torch.randperm(gate.channels, generator=torch.Generator().manual_seed(number))
        mask = torch.zeros(1, gate.channels)
        mask[:, order[:opened]] = 1
        gate.forced = mask.bool()
    check(model, pictures(2), gathers)
    assert bool(gathers) == (opened > 0)  # without any channel there is nothing to convolve


@CAN
def test_changed_weights_are_prepared_anew(gathers):
    model, x = enable_sparse(build('bottleneck')), pictures(1)
    twin = build('bottleneck')
    with torch.no_grad():
        for _ in range(2):
            model(x)
        for each in (model, twin):
            for name, weight in each.named_parameters():
                if 'gate' not in name:
                    weight.mul_(1.1)
        before = len(gathers)
        assert_equal_outputs(model(x), twin(x))
    assert len(gathers) > before


@CAN
def test_who_counts_sees_every_convolution(gathers):
    model, x = build('bottleneck'), pictures(1)
    with torch.no_grad():
        (wanted,) = count_macs(model, x)
        enable_sparse(model)
        model(x)
        (found,) = count_macs(model, x)
    assert gathers
    assert found.model_executed == wanted.model_executed
    assert found.model_dense == wanted.model_dense


@CAN
def test_a_shortcut_that_others_hold_is_left_alone(gathers):
    """Stages hand their output on and return it as well."""
    model, x = build(), pictures(1)
    with torch.no_grad():
        wanted = [out.clone() for out in model(x)]
        enable_sparse(model)
        model(x)
        outs = model(x)
        model(torch.randn_like(x))
    assert gathers
    assert_equal_outputs(outs, wanted)


@pytest.mark.parametrize('options', [dict(granularity=8), dict(channels_last=False)])
def test_other_settings_take_the_general_way(options, gathers):
    model, x = build(), pictures(1)
    with torch.no_grad():
        wanted = model(x)
        enable_sparse(model, **options)
        for _ in range(2):
            assert_equal_outputs(model(x), wanted)
    assert not gathers
