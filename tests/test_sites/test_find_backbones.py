# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Every stock backbone: what is found, and that gates change nothing but what they close."""

import pytest
import torch
import torch.nn as nn
from backbones import BACKBONES, build
from irrelevant import (
    assert_closed_is_irrelevant,
    assert_images_are_alone,
    assert_open_is_upstream,
    gate_all,
)

from fgc_mm.sites import find_sites

QUICK = ('resnet18', 'cspnext-tiny', 'stdc1', 'mobilenet-v3')
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BACKBONES
]
SIZE = {'deit-s': dict(img_size=64)}


def share_touched(net, sites, picture):
    """Part of the MACs in layers that sites switch, of all convolutions and linear layers."""
    macs, handles = {}, []
    for name, layer in net.named_modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):

            def note(layer, args, out, name=name):
                macs[name] = macs.get(name, 0) + out.numel() * layer.weight[0].numel()

            handles.append(layer.register_forward_hook(note))
    with torch.no_grad():
        net(picture)
    for handle in handles:
        handle.remove()
    touched = {end.module for s in sites for end in (*s.producers, *s.through, *s.consumers)}
    return sum(macs.get(name, 0) for name in touched) / sum(macs.values())


@pytest.mark.parametrize('name', NAMES)
def test_sites_and_their_share_of_the_macs(name):
    _, sites, percent = BACKBONES[name]
    net = build(name)
    net.eval()
    picture = torch.rand(1, 3, 224, 224)
    found = find_sites(net, picture if name == 'deit-s' else torch.rand(1, 3, 64, 64))
    assert len(found.sites) == sites
    assert share_touched(net, found.sites, picture) >= percent / 100
    assert len({r.name for r in found.refused} | {s.name for s in found.sites}) == len(
        found.refused
    ) + len(found.sites)


@pytest.mark.parametrize('name', NAMES)
def test_open_gates_change_nothing_and_closed_channels_are_irrelevant(name):
    torch.manual_seed(0)
    net = build(name, **SIZE.get(name, {}))
    example = torch.randn(2, 3, 64, 64)
    found = find_sites(net, example[:1])
    if not found.sites:
        assert name == 'repvgg-a0'
        return
    assert_open_is_upstream(lambda: build(name, **SIZE.get(name, {})), example)
    gates = gate_all(net, example, found=found)
    assert_closed_is_irrelevant(net, example, gates)
    assert_images_are_alone(net, example, gates)
