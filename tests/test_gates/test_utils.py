# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest
import torch
import torch.nn as nn
from gated_resnets import gated_resnet

from fgc_mm.gates import (
    find_gates,
    force_gates,
    gated_blocks,
    match_blocks,
    select_blocks,
    set_threshold,
)

NAMES_18 = [f'layer{stage}.{block}' for stage in (1, 2, 3, 4) for block in (0, 1)]


@pytest.fixture(scope='module')
def r18():
    return gated_resnet(18, base_channels=8)


@pytest.fixture(scope='module')
def detector():
    """A backbone inside something else, bottlenecks, some blocks only."""
    model = nn.Module()
    model.neck = nn.Linear(2, 2)
    model.backbone = gated_resnet(50, base_channels=8, gated_blocks=['layer3.5', 'layer4'])
    return model


def test_find_gates_in_network_order(r18, detector):
    assert list(find_gates(r18)) == [f'gates.{name.replace(".", "-")}-conv1' for name in NAMES_18]
    assert list(find_gates(detector))[:3] == [
        'backbone.gates.layer3-5-conv1',
        'backbone.gates.layer3-5-conv2',
        'backbone.gates.layer4-0-conv1',
    ]
    assert find_gates(nn.Linear(2, 2)) == {}


def test_gated_blocks(detector):
    blocks = gated_blocks(detector)
    assert list(blocks) == ['backbone.layer3.5'] + [f'backbone.layer4.{i}' for i in range(3)]
    names, gates = zip(*blocks['backbone.layer4.1'], strict=True)
    assert names == ('backbone.gates.layer4-1-conv1', 'backbone.gates.layer4-1-conv2')
    assert gates[1] is detector.backbone.gates.of('layer4.1.conv2')


@pytest.mark.parametrize(
    'layers, expected',
    [
        ('all', NAMES_18),
        ('last_stage', ['layer4.0', 'layer4.1']),
        ([-2, -1], ['layer4.0', 'layer4.1']),
        (0, ['layer1.0']),
        ('layer2', ['layer2.0', 'layer2.1']),
        (['layer4.1', 'layer3', -1], ['layer3.0', 'layer3.1', 'layer4.1']),
    ],
)
def test_select_blocks(r18, layers, expected):
    assert list(select_blocks(r18, layers)) == expected


@pytest.mark.parametrize(
    'layers, expected',
    [
        ('layer4.2', ['layer4.2']),
        ('backbone.layer4.2', ['layer4.2']),
        ('backbone.layer3', ['layer3.5']),
        ([0], ['layer3.5']),
        ('last_stage', ['layer4.0', 'layer4.1', 'layer4.2']),
    ],
)
def test_select_blocks_inside_a_model(detector, layers, expected):
    assert list(select_blocks(detector, layers)) == [f'backbone.{name}' for name in expected]


def test_the_prefix_of_a_single_stage_is_no_riddle():
    names = [f'backbone.layer4.{i}' for i in range(3)]
    assert match_blocks('layer4', names) == match_blocks('backbone.layer4', names) == names
    assert match_blocks('layer4.1', names) == ['backbone.layer4.1']


@pytest.mark.parametrize(
    'layers, words',
    [
        ('layer5', r"layers: 'layer5' names no block; choose from 'all', .*'layer4', 'layer1.0'"),
        (['layer1.2'], r"'layer1.2' names no block"),
        ('layer', "'layer' names no block"),
        (8, r'block index 8 is out of range, there are 8 blocks \(-8 to 7\)'),
        (-9, 'block index -9 is out of range'),
        ([], r'layers=\[\] chooses no block'),
    ],
)
def test_bad_choices_name_the_choices(r18, layers, words):
    with pytest.raises(ValueError, match=words):
        select_blocks(r18, layers)


def test_a_model_without_gates():
    with pytest.raises(ValueError, match="Linear has no gates to choose layers='all' from"):
        select_blocks(nn.Linear(2, 2), 'all')


def test_force_gates(r18):
    r18.train()
    x = torch.rand(2, 3, 64, 64)
    gates = find_gates(r18)
    with force_gates(r18, 0.0):
        r18(x)
        assert all(gate.record.mask.sum() == 0 for gate in gates.values())
        assert all(gate.record.probs.mean() > 0.5 for gate in gates.values())  # its own opinion
        with force_gates(r18, 1.0):
            r18(x)
            assert all(gate.record.mask.mean() == 1 for gate in gates.values())
        assert all(gate.forced == 0.0 for gate in gates.values())
    assert all(gate.forced is None for gate in gates.values())


def test_force_single_gates(r18):
    r18.eval()
    x = torch.rand(2, 3, 64, 64)
    per_channel = (torch.arange(8) % 2).float()
    per_image = torch.stack([torch.zeros(16), torch.ones(16)])
    with force_gates(r18, {'gates.layer1-0-conv1': per_channel, 'gates.layer2-1-conv1': per_image}):
        r18(x)
    gates = find_gates(r18)
    assert torch.equal(gates['gates.layer1-0-conv1'].record.mask, per_channel.expand(2, 8))
    assert torch.equal(gates['gates.layer2-1-conv1'].record.mask, per_image)
    assert gates['gates.layer1-1-conv1'].record.mask.mean() > 0.5


def test_force_gates_lets_go_after_an_error(r18):
    with pytest.raises(RuntimeError, match='out of memory'), force_gates(r18, 1.0):
        raise RuntimeError('out of memory')
    assert all(gate.forced is None for gate in find_gates(r18).values())


@pytest.mark.parametrize(
    'value, words',
    [
        ({'layer9.gate1': 1.0}, "no gate 'layer9.gate1'; the gates are gates.layer1-0-conv1"),
        (
            {'gates.layer1-0-conv1': torch.ones(9)},
            r"'gates.layer1-0-conv1' decides over 8 .* \(9,\)",
        ),
    ],
)
def test_force_gates_bad_input(r18, value, words):
    with pytest.raises(ValueError, match=words), force_gates(r18, value):
        pass


def test_threshold_closes_what_is_less_probable():
    torch.manual_seed(0)
    backbone = gated_resnet(18, base_channels=8)
    backbone.eval()
    gates = find_gates(backbone)
    for gate in gates.values():
        torch.nn.init.normal_(gate.fc2.bias)
    set_threshold(backbone, 0.7)
    backbone(torch.rand(2, 3, 32, 32))
    for gate in gates.values():
        assert torch.equal(gate.record.mask, (gate.record.probs > 0.7).float())
        assert 0 < gate.record.mask.mean() < 1


@pytest.mark.parametrize(
    'model, threshold, message',
    [
        (gated_resnet(18, base_channels=8), 1.0, r'threshold=1.0 must be within \(0, 1\)'),
        (gated_resnet(18, base_channels=8, gate=None), 0.4, 'ResNet has no gates'),
        (
            gated_resnet(18, base_channels=8, gate=dict(type='FBSGate')),
            0.4,
            'FBSGate gates.layer1-0-conv1 has no threshold',
        ),
    ],
)
def test_threshold_that_cannot_be_set(model, threshold, message):
    with pytest.raises(ValueError, match=message):
        set_threshold(model, threshold)
