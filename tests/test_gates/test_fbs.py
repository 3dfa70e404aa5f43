# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest
import torch
from gated_resnets import gated_resnet

from fgc_mm.gates import FBSGate


def test_by_hand():
    """Four channels, density 0.5, saliencies 3, 0, 1, 2: the first and last stay."""
    gate = FBSGate(1, 4, density=0.5)
    with torch.no_grad():
        gate.fc.weight.copy_(torch.tensor([[2.0], [-3.0], [0.0], [1.0]]))
    x = torch.tensor([[[[1.0, -1.0], [1.0, -1.0]]]])  # mean 0, mean |x| 1
    assert gate(x).tolist() == [[3.0, 0.0, 0.0, 2.0]]
    assert gate.record.logits.tolist() == [[3.0, 0.0, 1.0, 2.0]]
    assert gate.record.mask.tolist() == gate.record.probs.tolist() == [[1.0, 0.0, 0.0, 1.0]]
    assert not gate.record.mask.requires_grad


def test_gradient_passes_the_kept_channels_only():
    gate = FBSGate(3, 6, density=0.5).double()
    x = torch.rand(4, 3, dtype=torch.float64)
    weight = torch.randn(4, 6, dtype=torch.float64)
    (gate(x) * weight).sum().backward()
    expected = (weight * gate.record.mask).sum(dim=0)
    assert torch.allclose(gate.fc.bias.grad, expected, atol=1e-12)


@pytest.mark.parametrize('density, kept', [(1.0, 10), (0.5, 5), (0.41, 5), (0.01, 1)])
def test_density_is_rounded_up(density, kept):
    gate = FBSGate(4, 10, density=density)
    with torch.no_grad():
        gate.fc.weight.uniform_(0, 1)
    assert (gate(torch.rand(3, 4)) > 0).sum(dim=1).tolist() == [kept] * 3


def test_a_kept_channel_without_saliency_is_closed():
    gate = FBSGate(2, 4, density=0.75)
    with torch.no_grad():
        gate.fc.weight.zero_()
        gate.fc.bias.copy_(torch.tensor([1.0, -1.0, -1.0, 2.0]))
    gate(torch.rand(1, 2))
    assert gate.record.mask.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_training_and_evaluation_decide_alike_for_one_image():
    gate = FBSGate(4, 10)
    x = torch.rand(1, 4, 5, 5)
    assert torch.equal(gate.train()(x), gate.eval()(x))
    gate.train()(x).sum().backward()
    assert gate.fc.bias.grad.abs().sum() > 0


def test_starts_unboosted_and_survives_init_weights():
    backbone = gated_resnet(18, base_channels=8, gate=dict(type='FBSGate', density=0.25))
    backbone.init_weights()
    gate = backbone.gates.of('layer2.0.conv1')
    assert (gate.fc.bias == 1).all() and gate.fc.weight.abs().sum() > 0
    backbone(torch.rand(2, 3, 64, 64))
    assert (gate.record.mask.sum(dim=1) <= 4).all() and gate.record.mask.sum() > 0


@pytest.mark.parametrize('density', [0, 1.5])
def test_bad_density(density):
    with pytest.raises(ValueError, match=rf'density={density} must be within \(0, 1\]'):
        FBSGate(4, 10, density=density)


def test_no_budget_can_move_it():
    for move in (FBSGate(8, 16).shift, FBSGate(8, 16).sharpen):
        with pytest.raises(ValueError, match='openness is not learned; use BinConcreteGate'):
            move(0.5)


def test_weight_scale_leaves_a_network_nearly_unboosted():
    torch.manual_seed(0)
    whole = FBSGate(16, 32, density=1)
    torch.manual_seed(0)
    small = FBSGate(16, 32, density=1, weight_scale=0.01)
    assert torch.allclose(small.fc.weight, 0.01 * whole.fc.weight)
    assert torch.allclose(small(torch.rand(4, 16)), torch.ones(4, 32), atol=0.1)
    with pytest.raises(ValueError, match='weight_scale=0 must be positive'):
        FBSGate(4, 10, weight_scale=0)


def test_another_density_in_training_alone():
    gate = FBSGate(8, 16, density=0.25)
    gate.training_density = 0.75
    x = torch.rand(4, 8)
    assert (gate.train()(x) > 0).sum(dim=1).tolist() != (gate.eval()(x) > 0).sum(dim=1).tolist()
    assert (gate(x) > 0).sum(dim=1).max() <= 4
