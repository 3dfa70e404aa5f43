# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Criteria against literal computations on the network without gates."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fgc_mm
from fgc_mm.gates import find_gates, force_gates
from fgc_mm.pruning import features, l2, taylor


class Plain(nn.Module):
    """A depthwise convolution, groups and a norm between producers and consumers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a = nn.Conv2d(8, 12, 1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.b = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.c = nn.Conv2d(12, 8, 1)
        self.d = nn.Conv2d(8, 6, 3)
        self.groups = nn.Conv2d(6, 9, 3, groups=3)
        self.head = nn.Linear(9, 5)

    def forward(self, x):
        x = self.stem(x).sin()
        x = x + self.c(F.relu(self.b(F.relu(self.norm(self.a(x))))))
        return self.head(self.groups(F.relu(self.d(x))).mean(dim=(2, 3)))


@pytest.fixture(scope='module')
def pair():
    """The same network without and with gates."""
    torch.manual_seed(0)
    plain = Plain()
    plain.norm.running_mean.normal_()
    plain.eval()
    network = fgc_mm.gate(
        copy.deepcopy(plain), torch.rand(1, 3, 12, 12), dict(type='StaticGate'), sites=['a', 'd']
    )
    return plain, network


def test_l2_is_the_length_of_the_filters(pair):
    plain, network = pair
    sites = network.gates.sites
    assert sites['a'].channels == 12 and sites['d'].channels == 3  # by the groups behind
    lengths = torch.stack([w.norm() for w in plain.a.weight])
    torch.testing.assert_close(l2(network, sites['a']), lengths / lengths.mean())
    lengths = torch.stack([plain.d.weight[2 * i : 2 * i + 2].norm() for i in range(3)])
    torch.testing.assert_close(l2(network, sites['d']), lengths / lengths.mean())


def test_taylor_is_activation_times_gradient(pair):
    plain, network = pair
    x, y = torch.rand(7, 3, 12, 12), torch.arange(7) % 5
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]

    # What the consumers read, and the slope of the loss there.
    seen = {}
    for name in ('c', 'head'):
        layer = plain.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0]))
    want = dict(a=torch.zeros(12), d=torch.zeros(3))
    for pictures, labels in batches:
        loss = F.cross_entropy(plain(pictures), labels)
        read = [seen['c'], seen['head']]
        for key, each, slope in zip(want, read, torch.autograd.grad(loss, read), strict=True):
            products = len(pictures) * (each * slope)
            # Over positions; three outputs of a group follow one decision.
            products = products.sum((2, 3)) if key == 'a' else products.view(-1, 3, 3).sum(2)
            want[key] += products.detach().square().sum(dim=0)

    modes = {name: m.training for name, m in network.train().named_modules()}
    found = taylor(
        network, find_gates(network), batches, lambda b: F.cross_entropy(network(b[0]), b[1])
    )
    torch.testing.assert_close(found['gates.a'], want['a'])
    torch.testing.assert_close(found['gates.d'], want['d'])
    # Nothing is left of it.
    assert modes == {name: m.training for name, m in network.named_modules()}
    assert all(p.grad is None for p in network.parameters())
    assert all(gate.forced is None for gate in find_gates(network).values())
    assert torch.equal(network.norm.running_mean, plain.norm.running_mean)


def test_features_is_the_slope_of_all_outputs(pair):
    """Random directions find it on average; here it is computed output by output."""
    _, network = pair
    network.eval()
    gates = find_gates(network)
    x = torch.rand(6, 3, 12, 12)
    masks = {name: torch.ones(6, gate.channels) for name, gate in gates.items()}

    def outputs(*values):
        with force_gates(network, dict(zip(masks, values, strict=True))):
            return network(x)

    out = outputs(*masks.values())
    scale = out.square().mean() * out[0].numel()
    jacobians = torch.autograd.functional.jacobian(outputs, tuple(masks.values()))
    want = {
        name: torch.stack([jacobian[i, :, i].square().sum(dim=0) for i in range(6)]).sum(dim=0)
        for name, jacobian in zip(masks, jacobians, strict=True)
    }
    found = [
        features(network, network, gates, [x[:2], x[2:4], x[4:]], network, seed)
        for seed in range(150)
    ]
    for name in masks:
        mean = torch.stack([scores[name] for scores in found]).mean(dim=0)
        torch.testing.assert_close(mean, (want[name] / scale).detach(), rtol=0.4, atol=1e-4)
    again = features(network, network, gates, [x[:2], x[2:4], x[4:]], network, 0)
    assert all(torch.equal(again[name], found[0][name]) for name in masks)
