# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Random networks: whatever is called a site is one."""

import copy

import pytest
import torch
import torch.nn as nn
from hypothesis import HealthCheck, given, settings
from irrelevant import (
    assert_closed_is_irrelevant,
    assert_images_are_alone,
    equal,
    gate_all,
    run,
)
from random_networks import SIZE, networks

from fgc_mm.gates import force_gates
from fgc_mm.sites import find_sites

OPTIONS = dict(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def check(net):
    torch.manual_seed(0)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean, -1, 1)
            nn.init.uniform_(part.running_var, 0.5, 2)
            nn.init.uniform_(part.weight, 0.5, 2)
            nn.init.uniform_(part.bias, -1, 1)
    example = torch.randn(3, 3, SIZE, SIZE)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    found = find_sites(net, example[:1])
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    names = {n for n, m in net.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    told = [s.name for s in found.sites] + [r.name for r in found.refused]
    assert len(set(told)) == len(told) and set(told) <= names
    if not found.sites:
        return 0
    plain = copy.deepcopy(net)
    gates = gate_all(net, example, found=found)
    with force_gates(gates, 1.0):
        for training in (False, True):
            assert equal(run(net, example, training), run(plain, example, training))
    assert_closed_is_irrelevant(net, example, gates)
    if all(  # nothing in the network itself lets images meet
        torch.allclose(part, together[i : i + 1], atol=1e-4)
        for together, *alone in zip(
            run(plain, example), *(run(plain, image[None]) for image in example), strict=True
        )
        for i, part in enumerate(alone)
    ):
        assert_images_are_alone(net, example, gates)
    return len(found.sites)


@settings(max_examples=30, **OPTIONS)
@given(networks())
def test_a_site_of_a_random_network(net):
    check(net)


@pytest.mark.slow
@settings(max_examples=500, **OPTIONS)
@given(networks())
def test_a_site_of_many_random_networks(net):
    check(net)
