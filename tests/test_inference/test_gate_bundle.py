# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A bundle of gates decides what each of them decides."""

import copy

import pytest
import torch

from fgc_mm.gates import BinConcreteGate, FBSGate
from fgc_mm.inference.gate_bundle import GateBundle

NORMS = dict(BN=dict(type='BN1d'), LN=dict(type='LN'), none=None)


def make_gates(norm1, norm2):
    torch.manual_seed(0)
    gates = dict(
        gate1=BinConcreteGate(24, 40, norm_cfg=norm1, bias_init=0.0),
        gate2=BinConcreteGate(24, 32, hidden=8, norm_cfg=norm2, bias_init=0.0),
    )
    for gate in gates.values():
        gate.train()
        for _ in range(3):  # running statistics that are not the initial ones
            gate(3 * torch.rand(8, 24) + 1)
        gate.fc2.weight.data *= 30
    return {name: gate.eval() for name, gate in gates.items()}


def check(gates, x):
    expected = {name: copy.deepcopy(gate)(x) for name, gate in gates.items()}
    with torch.no_grad():
        decided = GateBundle(gates).decide(x)
    for name, gate in gates.items():
        assert torch.equal(decided[name], expected[name]), name
        assert torch.equal(gate.record.mask, expected[name])
        reference = copy.deepcopy(gate)
        reference(x)
        torch.testing.assert_close(gate.record.logits, reference.record.logits.detach())
        torch.testing.assert_close(gate.record.probs, reference.record.probs.detach())
    return decided


@pytest.mark.parametrize('norm1', NORMS)
@pytest.mark.parametrize('norm2', NORMS)
@pytest.mark.parametrize('batch', [1, 3])
def test_same_decisions(norm1, norm2, batch):
    gates = make_gates(NORMS[norm1], NORMS[norm2])
    assert GateBundle.fits(gates)
    decided = check(gates, torch.rand(batch, 24, 9, 9))
    assert all(0 < float(mask.mean()) < 1 for mask in decided.values())


@pytest.mark.parametrize('norm', ['BN', 'LN'])
def test_autocast_does_not_reach_the_decision(norm):
    gates = make_gates(NORMS[norm], NORMS[norm])
    with torch.autocast('cpu', torch.bfloat16):
        check(gates, torch.rand(2, 24, 9, 9))
    assert all(gate.record.logits.dtype == torch.float32 for gate in gates.values())


def test_every_gate_has_its_own_threshold():
    gates = make_gates(NORMS['BN'], NORMS['BN'])
    gates['gate2'].threshold = 0.9
    check(gates, torch.rand(2, 24, 9, 9))


def test_forced_gates():
    gates = make_gates(NORMS['BN'], NORMS['BN'])
    gates['gate1'].forced = 1.0
    gates['gate2'].forced = (torch.rand(1, 32) > 0.5).float()
    check(gates, torch.rand(2, 24, 9, 9))


@pytest.mark.parametrize('part', ['fc1', 'norm', 'fc2'])
def test_changed_weights_are_noticed(part):
    gates = make_gates(NORMS['BN'], NORMS['BN'])
    bundle, x = GateBundle(gates), torch.rand(2, 24, 9, 9)
    with torch.no_grad():
        bundle.decide(x)
        getattr(gates['gate2'], part).weight.mul_(-1)
        decided = bundle.decide(x)
    assert torch.equal(decided['gate2'], copy.deepcopy(gates['gate2'])(x))


def test_what_does_not_fit():
    assert not GateBundle.fits(dict(gate1=FBSGate(24, 40)))
    assert not GateBundle.fits(dict(gate1=BinConcreteGate(24, 8), gate2=BinConcreteGate(16, 8)))

    class Other(BinConcreteGate):
        pass

    assert not GateBundle.fits(dict(gate1=Other(24, 8)))


def test_hooks_are_seen():
    gates = make_gates(NORMS['BN'], NORMS['BN'])
    bundle = GateBundle(gates)
    assert not bundle.watched()
    gates['gate2'].fc1.register_forward_hook(lambda *_: None)
    assert bundle.watched()
