# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""``widths`` of gated networks: fewer channels from the start."""

import pytest
import torch
from mmengine.registry import MODELS

import fgc_mm  # noqa: F401
from fgc_mm.errors import UsageError
from fgc_mm.gates import find_gates

PLAIN = dict(type='mmdet.ResNet', depth=18, base_channels=8)
WIDTHS = {'layer1.0.conv1': 5, 'layer4.1.conv1': 1}


def build(**options):
    return MODELS.build(dict(type='Gated', backbone=PLAIN, **options))


@torch.no_grad()
def test_channels_of_layers_and_gates():
    net = build(widths=WIDTHS)
    block = net.layer1[0]
    assert (block.conv1.out_channels, block.bn1.num_features, block.conv2.in_channels) == (5, 5, 5)
    assert block.conv2.out_channels == 8 and net.layer1[1].conv1.out_channels == 8
    gates = find_gates(net)
    assert gates['gates.layer1-0-conv1'].channels == 5
    assert gates['gates.layer4-1-conv1'].channels == 1
    assert len(gates) == 8
    net.eval()
    assert len(net(torch.rand(1, 3, 64, 64))) == 4


def test_without_gates():
    net = build(widths=WIDTHS, gate=None)
    assert net.layer4[1].conv1.weight.shape[0] == 1
    assert not find_gates(net)
    assert set(net.state_dict()) == set(MODELS.build(PLAIN).state_dict())


@pytest.mark.parametrize(
    ('widths', 'message'),
    [
        ({'layer1.0.conv9': 3}, "widths: 'layer1.0.conv9' is no site; there are"),
        ({'layer1.0.conv1': 0}, 'must be a number of channels from 1 to 8'),
        ({'layer1.0.conv2': 4}, "'layer1.0.conv2' is no site"),
    ],
)
@pytest.mark.parametrize('gate', [None, dict(type='BinConcreteGate')])
def test_what_makes_no_sense_is_named(widths, message, gate):
    with pytest.raises(UsageError, match=message):
        build(widths=widths, gate=gate)
