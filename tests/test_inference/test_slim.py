# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Slimmed networks are smaller and compute the same."""

import pytest
import torch
from mmengine.registry import MODELS
from sparse_networks import FAMILIES, assert_equal_outputs, build, pictures

from fgc_mm.gates import find_gates, force_gates
from fgc_mm.inference import GateUsage, freeze, slim
from fgc_mm.macs import count_macs

SLIMMABLE = [family for family in FAMILIES if family != 'fbs']
families = pytest.mark.parametrize('family', SLIMMABLE)


@pytest.fixture(autouse=True)
def without_gradients():
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


def shares_of(model, x):
    usage = GateUsage(model)
    usage.attach()
    for picture in x.split(3):
        model(picture)
    usage.detach()
    model(x[:1])  # is not counted any more
    return usage.shares()


def rebuild(family, result, **options):
    model = MODELS.build({**FAMILIES[family], **options, **result.backbones['']}).eval()
    model.load_state_dict(result.state_dict)
    return model


def parameters(model):
    return sum(param.numel() for param in model.parameters())


@families
def test_calibration_pictures_give_the_same_and_cost_less(family):
    model = build(family)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = pictures(4)
    wanted = model(x)
    shares = shares_of(model, x)
    result = slim(model, shares)
    smaller = rebuild(family, result)
    assert_equal_outputs(smaller(x), wanted)
    assert parameters(smaller) < 0.95 * parameters(model)
    for old, new in zip(count_macs(model, x), count_macs(smaller, x), strict=True):
        assert new.model_dense < 0.95 * old.model_dense
        assert new.model_executed < old.model_executed
    for row in result.gates:
        share = shares[row['gate']]
        removable = not (family == 'mobilenet' and row['gate'].startswith('layer1.'))
        assert row['removed'] == (int((share == 0).sum()) if removable else 0)
        assert row['always_open'] == int((share == 1).sum())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert_equal_outputs(freeze(smaller, way='gathered')(x), wanted)


def test_what_is_always_open_stays_open_for_other_pictures():
    model = build()
    x = pictures(4)
    shares = shares_of(model, x)
    smaller = rebuild('basic', slim(model, shares))
    smaller.train()  # noise cannot close it
    smaller(100 * torch.randn(6, 3, 32, 32))
    gates = find_gates(smaller)
    assert any((share == 1).any() and not (share >= 1).all() for share in shares.values())
    for name, gate in gates.items():
        kept = shares[name][shares[name] > 0]
        assert (gate.record.mask[:, kept == 1] == 1).all(), name


def test_shares_are_counted_over_all_pictures():
    model = build()
    x = pictures(4)
    masks = {}
    model(x)
    for name, gate in find_gates(model).items():
        masks[name] = gate.record.mask
    for name, share in shares_of(model, x).items():
        assert torch.equal(share, masks[name].mean(dim=0)), name


def test_tolerance_removes_more():
    model = build()
    shares = shares_of(model, pictures(8))
    exact, more = slim(model, shares), slim(model, shares, tolerance=0.3)
    assert sum(r['removed'] for r in more.gates) > sum(r['removed'] for r in exact.gates)
    for row in more.gates:
        assert row['removed'] == min(int((shares[row['gate']] <= 0.3).sum()), row['channels'] - 1)
    rebuild('basic', more)(pictures(2))


@families
def test_closed_gates_leave_one_channel_open_ones_no_gate(family):
    model = build(family)
    x = pictures(2)
    with force_gates(model, 1.0):
        wanted = model(x)
        dense = rebuild(family, slim(model, shares_of(model, x)))
    assert not find_gates(dense)
    assert_equal_outputs(dense(x), wanted)
    for gate in find_gates(model).values():
        gate.fc2.weight.zero_()
        gate.fc2.bias.fill_(-1)
    wanted = model(x)
    result = slim(model, shares_of(model, x))
    assert_equal_outputs(rebuild(family, result)(x), wanted)
    for row in result.gates:
        fixed = family == 'mobilenet' and row['gate'].startswith('layer1.')
        assert row['removed'] == (0 if fixed else row['channels'] - 1)


def test_some_gates_of_a_bottleneck_can_go_and_slimming_can_be_repeated():
    model = build('bottleneck')
    for name in ('layer1.0.gate2', 'layer2.1.gate1'):
        gate = model.get_submodule(name)
        gate.fc2.weight.zero_()
        gate.fc2.bias.fill_(1)
    x = pictures(4)
    wanted = model(x)
    result = slim(model, shares_of(model, x))
    smaller = rebuild('bottleneck', result)
    gone = set(find_gates(model)) - set(find_gates(smaller))
    assert {'layer1.0.gate2', 'layer2.1.gate1'} <= gone < set(find_gates(model))
    again = slim(smaller, shares_of(smaller, x[:1]))
    smallest = rebuild('bottleneck', again)
    assert parameters(smallest) < parameters(smaller)
    assert_equal_outputs(smallest(x[:1]), smaller(x[:1]))
    assert_equal_outputs(smaller(x), wanted)


def test_what_cannot_be_slimmed_is_named():
    with pytest.raises(ValueError, match='no gated backbone with gates'):
        slim(build(gate=None), {})
    with pytest.raises(ValueError, match='tolerance=1 must be'):
        slim(build(), {}, tolerance=1)
    model = build('fbs')
    with pytest.raises(ValueError, match='FBSGate cannot be slimmed'):
        slim(model, shares_of(model, pictures(2)))
    model = build(norm_cfg=dict(type='GN', num_groups=4))
    with pytest.raises(ValueError, match=r'layer1\.0\.gate1: gn1 is a GroupNorm'):
        slim(model, shares_of(model, pictures(2)))
    with pytest.raises(ValueError, match='has decided for no image'):
        GateUsage(build()).shares()


@pytest.mark.parametrize('widths', [{'layer1.0.conv9': 3}, {'layer1.0.conv1': 0}, {'conv1': 4}])
def test_widths_that_make_no_sense_are_named(widths):
    with pytest.raises(ValueError, match=r'widths\[.* must be a number of channels'):
        build(widths=widths)
