# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A bundle of gates decides what each of them decides."""

import copy

import pytest
import torch
import torch.nn as nn

from fgc_mm.gates import BinConcreteGate, FBSGate
from fgc_mm.gates.bin_concrete import logit_of
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
        decided = {
            name: torch.from_numpy(value.copy()).float()
            for name, value in GateBundle(gates).decide(x).items()
        }
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


def test_thresholds_and_sizes_may_change():
    gates = make_gates(NORMS['BN'], NORMS['none'])
    bundle = GateBundle(gates)
    for size, threshold in ((9, 0.5), (9, 0.7), (5, 0.7), (40, 0.3), (9, 0.0), (9, 1.0)):
        gates['gate1'].threshold = threshold
        x = torch.rand(2, 24, size, size)
        with torch.no_grad():
            decided = bundle.decide(x)
        for name, gate in gates.items():
            mask = copy.deepcopy(gate)(x)
            assert torch.equal(torch.from_numpy(decided[name]).float(), mask)


@pytest.mark.parametrize('threshold', [1e-7, 0.99999, 0.999999, 1 - 1e-7, 1 - 1e-9, 1 - 1e-15])
@pytest.mark.parametrize('norm', ['BN', 'LN'])
def test_thresholds_close_to_one(norm, threshold):
    gates = make_gates(NORMS[norm], NORMS['none'])
    for gate in gates.values():
        gate.threshold = threshold
        gate.fc2.weight.data *= 0.01
        cut = logit_of(threshold)
        gate.fc2.bias.data = cut + torch.linspace(-2, 2, gate.channels)
        gate.fc2.weight.data[:3] = 0  # a tie is closed
        gate.fc2.bias.data[0] = cut
        gate.fc2.bias.data[1:3] = gate.fc2.bias.data[0] * (1 + torch.tensor([-2e-7, 2e-7]))
    decided = check(gates, torch.rand(4, 24, 9, 9))
    assert all(0.3 < float(mask.mean()) < 0.7 for mask in decided.values())


def test_records_without_a_graph():
    gates = make_gates(NORMS['BN'], NORMS['LN'])
    with torch.no_grad():
        GateBundle(gates).decide(torch.rand(2, 24, 9, 9))
    record = gates['gate1'].record
    copied = record.detach()
    for key in ('logits', 'probs', 'mask'):
        assert torch.equal(getattr(copied, key), getattr(record, key))
    assert record.feature is None
    with pytest.raises(AttributeError):
        record.nothing  # noqa: B018


@pytest.mark.parametrize('part', ['fc1', 'norm', 'fc2'])
def test_changed_weights_are_noticed(part):
    gates = make_gates(NORMS['BN'], NORMS['BN'])
    bundle, x = GateBundle(gates), torch.rand(2, 24, 9, 9)
    with torch.no_grad():
        bundle.decide(x)
        getattr(gates['gate2'], part).weight.mul_(-1)
        decided = bundle.decide(x)
    decided = torch.from_numpy(decided['gate2']).float()
    assert torch.equal(decided, copy.deepcopy(gates['gate2'])(x))


def test_a_changed_eps_is_noticed():
    gates = make_gates(NORMS['BN'], NORMS['BN'])
    x = torch.rand(2, 24, 9, 9)
    bundle = GateBundle(gates)
    with torch.no_grad():
        bundle.decide(x)
        before = gates['gate2'].record.logits
        gates['gate2'].norm.eps = 1.0
        bundle.decide(x)
        logits = gates['gate2'].record.logits
        gates['gate2'](x)
    torch.testing.assert_close(logits, gates['gate2'].record.logits)
    assert (logits - before).abs().max() > 1e-2


def test_what_does_not_fit():
    assert not GateBundle.fits(dict(gate1=FBSGate(24, 40)))
    assert not GateBundle.fits(dict(gate1=BinConcreteGate(24, 8), gate2=BinConcreteGate(16, 8)))

    class Other(BinConcreteGate):
        pass

    assert not GateBundle.fits(dict(gate1=Other(24, 8)))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize('name', ['fc1', 'fc2'])
def test_layers_of_another_type_do_not_fit(name):
    gate = BinConcreteGate(24, 8)
    old = getattr(gate, name)
    setattr(gate, name, Doubled(old.in_features, old.out_features))
    assert not GateBundle.fits(dict(gate1=gate))


@pytest.mark.parametrize('norm', ['BN', 'LN', 'none'])
@pytest.mark.parametrize('dtypes', ['double double', 'bfloat16 bfloat16', 'float double'])
def test_gates_of_another_type_than_the_input(dtypes, norm):
    gates = make_gates(NORMS[norm], NORMS[norm])
    bundle, x = GateBundle(gates), torch.rand(2, 24, 9, 9)
    with torch.no_grad():
        bundle.decide(x)
        for gate, dtype in zip(gates.values(), dtypes.split(), strict=True):
            gate.to(getattr(torch, dtype))
        decided = bundle.decide(x)
    for name, gate in gates.items():
        record = gate.record
        mask = copy.deepcopy(gate)(x).float()
        agree = torch.from_numpy(decided[name]).float() == mask
        # Rounding of bfloat16 decides where a folded norm rounds otherwise.
        assert agree.float().mean() >= (0.9 if 'bfloat16' in dtypes else 1)
        assert record.mask.shape == mask.shape


def test_hooks_are_seen():
    gates = make_gates(NORMS['BN'], NORMS['BN'])
    bundle = GateBundle(gates)
    assert not bundle.watched()
    gates['gate2'].fc1.register_forward_hook(lambda *_: None)
    assert bundle.watched()
