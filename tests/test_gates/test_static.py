# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest
import torch
from gated_resnets import gated_resnet

from fgc_mm.gates import StaticGate, find_gates, force_gates
from fgc_mm.macs import count_macs

STATIC = dict(type='StaticGate')


def test_every_picture_has_the_mask():
    gate = StaticGate(8, 6)
    gate.mask[[1, 4]] = 0
    for mode in (True, False):
        gate.train(mode)
        factors = gate(torch.rand(3, 8, 4, 4))
        assert torch.equal(factors, torch.tensor([1.0, 0, 1, 1, 0, 1]).expand(3, -1))
        assert torch.equal(gate.record.mask, factors) and torch.equal(gate.record.probs, factors)
        assert torch.equal(gate.record.logits > 0, factors > 0)
    assert list(gate.parameters()) == [] and not gate.shiftable()


def test_it_costs_nothing_and_open_it_changes_nothing():
    torch.manual_seed(0)
    network = gated_resnet(18, base_channels=8, gate=STATIC)
    plain = gated_resnet(18, base_channels=8, gate=None)
    plain.load_state_dict(network.state_dict(), strict=False)
    network.eval()
    plain.eval()
    x = torch.rand(2, 3, 64, 64)
    for ours, theirs in zip(network(x), plain(x), strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = count_macs(network, x)[0], count_macs(plain, x)[0]
    assert ours.model_executed == ours.model_dense == theirs.model_dense


def test_the_mask_is_part_of_a_checkpoint_and_initializing_leaves_it():
    one, other = (gated_resnet(18, base_channels=8, gate=STATIC) for _ in range(2))
    for gate in find_gates(one).values():
        gate.mask[::2] = 0
    other.load_state_dict(one.state_dict())
    other.init_weights()
    for name, gate in find_gates(other).items():
        assert torch.equal(gate.mask, find_gates(one)[name].mask)


def test_a_smaller_one_has_the_channels_that_are_kept():
    gate = StaticGate(8, 6)
    gate.mask[1] = 0
    kept = torch.tensor([0, 2, 3, 4, 5])
    small = StaticGate(8, 5)
    small.load_state_dict(gate.slim_state(kept, torch.ones(5, dtype=torch.bool), torch.arange(8)))
    assert small.mask.tolist() == [1] * 5


def test_it_can_be_forced_like_any_gate():
    gate = torch.nn.ModuleDict(dict(one=StaticGate(8, 6)))
    gate['one'].mask.zero_()
    with force_gates(gate, 1.0):
        assert gate['one'](torch.rand(2, 8)).sum() == 12
    with pytest.raises(ValueError, match='in_channels=8'):
        gate['one'](torch.rand(2, 7))
