# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a gate does to the layer that reads its channels."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fgc_mm

GATES = {
    'concrete': dict(type='BinConcreteGate', hidden=4, norm_cfg=None, bias_init=0.0),
    'fbs': dict(type='FBSGate', density=0.5),
}


@pytest.fixture(params=GATES)
def network(request):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
    fgc_mm.gate(network, torch.rand(1, 3, 8, 8), GATES[request.param], sites='stem')
    network.gates.of('0').wants_feature = True
    return network


def test_the_reader_sees_the_feature_times_the_multiplier(network):
    x = torch.randn(3, 3, 8, 8)
    out = network(x)
    gate = network.gates.of('0')
    with torch.no_grad():
        feature = F.relu(F.conv2d(x, network[0].weight, network[0].bias))
        masked = feature * gate.multiplier[:, :, None, None]
        assert torch.equal(out, F.conv2d(masked, network[2].weight, network[2].bias))
    assert torch.allclose(gate.record.feature, feature.mean(dim=(2, 3)), atol=1e-6)
    assert not gate.record.feature.requires_grad
    assert 0 < (gate.record.mask == 0).float().mean() < 1


def test_gradient_at_the_multiplier_is_the_feature(network):
    """d loss / d mask = sum over positions of gradient x ungated feature, for
    closed channels too: that is how a closed one can open again."""
    x, weight = torch.randn(3, 3, 8, 8), torch.randn(3, 4, 4, 4)
    out = network(x)
    multiplier = network.gates.of('0').multiplier
    multiplier.retain_grad()
    (out * weight).sum().backward()
    with torch.no_grad():
        feature = F.relu(F.conv2d(x, network[0].weight, network[0].bias))
        grad = F.conv_transpose2d(weight, network[2].weight)
        wanted = (grad * feature).sum(dim=(2, 3))
    assert torch.allclose(multiplier.grad, wanted, atol=1e-4)


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_the_mask_is_of_the_type_of_the_feature(network, dtype):
    network.to(dtype)
    assert network(torch.rand(2, 3, 8, 8, dtype=dtype)).dtype == dtype
