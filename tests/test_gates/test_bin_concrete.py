# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import math

import pytest
import torch

from fgc_mm.gates import BinConcreteGate


def make(**kwargs):
    torch.manual_seed(0)
    gate = BinConcreteGate(8, 12, **kwargs)
    with torch.no_grad():
        gate.fc2.weight.mul_(20)  # away from the nearly dense start
        gate.fc2.bias.zero_()
    return gate


def test_equations_in_double():
    """Logits, probabilities and evaluation mask are those of the paper."""
    gate = make().double().eval()
    gate.norm.running_mean.uniform_(-0.1, 0.1)
    gate.norm.running_var.uniform_(0.5, 1.5)
    x = torch.rand(5, 8, 6, 7, dtype=torch.float64)
    mask = gate(x)
    pooled = x.sum(dim=(2, 3)) / 42
    hidden = pooled @ gate.fc1.weight.T
    hidden = (hidden - gate.norm.running_mean) / (gate.norm.running_var + gate.norm.eps).sqrt()
    hidden = (hidden * gate.norm.weight + gate.norm.bias).clamp(min=0)
    logits = hidden @ gate.fc2.weight.T + gate.fc2.bias
    assert torch.allclose(gate.record.logits, logits, atol=1e-12)
    assert torch.allclose(gate.record.probs, 1 / (1 + (-logits).exp()), atol=1e-12)
    assert torch.equal(mask, (logits > 0).double())
    assert 0 < mask.mean() < 1


def test_threshold_moves_the_evaluation_mask():
    x = torch.rand(64, 8)
    strict = make(threshold=0.9).eval()
    mask = strict(x)
    assert torch.equal(mask, (strict.record.probs > 0.9).float())
    assert mask.sum() < make().eval()(x).sum()


@pytest.mark.parametrize('temperature', [2 / 3, 0.3])
def test_straight_through_gradient_is_the_analytic_one(temperature):
    """Hard forward; backward the derivative of sigmoid((a + noise) / T)."""
    gate = make(norm_cfg=None, temperature=temperature).double().train()
    x = torch.rand(16, 8, dtype=torch.float64)
    weight = torch.randn(16, 12, dtype=torch.float64)

    torch.manual_seed(7)
    mask = gate(x)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(gate.record.mask, mask) and not gate.record.mask.requires_grad
    (mask * weight).sum().backward()

    torch.manual_seed(7)
    uniform = torch.rand(16, 12, dtype=torch.float64)
    noise = uniform.log() - (1 - uniform).log()
    logits = (x @ gate.fc1.weight.T).clamp(min=0) @ gate.fc2.weight.T + gate.fc2.bias
    logits = logits.detach()
    assert torch.equal(mask, (logits + noise > 0).double())
    soft = torch.sigmoid((logits + noise) / temperature)
    expected = (weight * soft * (1 - soft) / temperature).sum(dim=0)
    assert torch.allclose(gate.fc2.bias.grad, expected, atol=1e-12)


def test_sampling_frequency_is_the_probability():
    """P(a + logistic noise > 0) = sigmoid(a), within five standard errors."""
    gate = make(norm_cfg=None).train()
    x = torch.rand(1, 8).expand(20000, 8)
    frequency = gate(x).mean(dim=0)
    probs = gate.record.probs[0]
    error = (probs * (1 - probs) / 20000).sqrt()
    assert ((frequency - probs).abs() < 5 * error + 1e-6).all()


@pytest.mark.parametrize('norm_cfg', [dict(type='BN1d'), dict(type='LN'), None])
def test_a_batch_of_one_trains(norm_cfg):
    gate = make(norm_cfg=norm_cfg).train()
    before = {name: value.clone() for name, value in gate.state_dict().items()}
    (gate(torch.rand(1, 8)) * torch.randn(1, 12)).sum().backward()
    assert gate.fc2.bias.grad.abs().sum() > 0
    assert torch.isfinite(gate.fc1.weight.grad).all()
    for name, value in gate.state_dict().items():  # one image says nothing about the statistics
        assert torch.equal(value, before[name]), name


def test_a_batch_of_one_uses_running_statistics():
    gate = make().train()
    for _ in range(50):
        gate(torch.rand(64, 8))
    x = torch.rand(1, 8)
    gate(x)
    logits = gate.record.logits
    gate.eval()(x)
    assert torch.allclose(logits, gate.record.logits, atol=1e-6)


def test_layer_norm_looks_at_one_image_only():
    """With LN the logits of an image are its own, also in training."""
    gate = make(norm_cfg=dict(type='LN')).train()
    x = torch.rand(6, 8)
    gate(x)
    together = gate.record.logits
    gate(x[2:3])
    assert torch.allclose(together[2:3], gate.record.logits, atol=1e-6)


def test_starts_nearly_dense_and_keeps_its_bias():
    gate = BinConcreteGate(8, 12, bias_init=3.0)
    gate.init_weights()
    assert torch.equal(gate.fc2.bias, torch.full((12,), 3.0))
    gate.train()(torch.rand(32, 8))
    assert gate.record.probs.mean().item() == pytest.approx(1 / (1 + math.exp(-3)), abs=0.05)
    with torch.no_grad():
        gate.fc2.bias.zero_()
    gate.init_weights()  # a second call changes nothing, as everywhere in mmengine
    assert gate.fc2.bias.abs().sum() == 0


def test_init_cfg_of_the_gate_wins():
    gate = BinConcreteGate(
        8, 12, init_cfg=dict(type='Constant', layer='Linear', val=0.5, bias=-1.0)
    )
    gate.init_weights()
    assert (gate.fc2.bias == -1).all() and (gate.fc1.weight == 0.5).all()


@pytest.mark.parametrize(
    'kwargs, words',
    [
        (dict(temperature=0), 'temperature=0'),
        (dict(threshold=1.0), r'threshold=1.0 must be within \(0, 1\)'),
        (dict(hidden=0), 'hidden=0'),
        (dict(in_channels=0), 'in_channels=0'),
    ],
)
def test_bad_values(kwargs, words):
    with pytest.raises(ValueError, match=words):
        BinConcreteGate(**{'in_channels': 8, 'channels': 12, **kwargs})


def test_norm_eval_keeps_the_statistics():
    """In training it normalizes with what it was loaded with; the rest still learns."""
    gate = make(norm_eval=True)
    gate.norm.running_mean.uniform_(-0.5, 0.5)
    before = gate.norm.running_mean.clone()
    x = torch.rand(2, 8)
    gate(x).sum().backward()
    assert torch.equal(gate.norm.running_mean, before)
    logits = gate.record.logits
    gate.eval()(x)
    assert torch.equal(gate.record.logits, logits)
    assert gate.train().training and not gate.norm.training
    assert gate.norm.weight.grad is not None


def test_thresholds_close_to_one_are_told_apart():
    """In float32 no probability lies between those of the logits 17 and 40."""
    gate = make(norm_cfg=None).eval()
    gate.fc2.weight.data.zero_()
    logits = torch.linspace(-20, 20, 12)
    gate.fc2.bias.data = logits
    cut = -math.log(2.0**-26)
    gate.threshold = 1 - 2.0**-26
    mask = gate(torch.rand(1, 8))[0]
    assert torch.equal(mask, (logits > cut).float()) and mask.sum() == 1
    gate.threshold = 2.0**-26
    assert torch.equal(gate(torch.rand(1, 8))[0], (logits > -cut).float())


def test_a_channel_that_is_open_for_good_is_open_at_every_threshold():
    gate = make(norm_cfg=None).eval()
    state = gate.slim_state(torch.arange(12), torch.ones(12, dtype=torch.bool), torch.arange(8))
    gate.load_state_dict(state)
    gate.threshold = math.nextafter(1, 0)
    assert bool(gate(torch.rand(2, 8)).all())
