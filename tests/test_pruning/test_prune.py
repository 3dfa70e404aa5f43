# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest
import torch
import torch.nn.functional as F
import torchvision
from gated_resnets import gated_resnet

import fgc_mm
from fgc_mm.gates import find_gates
from fgc_mm.inference.slim import slim
from fgc_mm.macs import count_macs

STATIC = dict(type='StaticGate')


def mobilenet():
    torch.manual_seed(0)
    network = torchvision.models.mobilenet_v2(num_classes=4, width_mult=0.5)
    return fgc_mm.gate(network, torch.rand(1, 3, 64, 64), STATIC)


def resnet():
    torch.manual_seed(0)
    return gated_resnet(18, base_channels=16, gate=STATIC)


def executed(network, images):
    network.eval()
    counted = count_macs(network, images)
    return sum(i.model_executed for i in counted) / sum(i.model_dense for i in counted)


@pytest.mark.parametrize('criterion', ['l2', 'taylor', 'random'])
@pytest.mark.parametrize(('make', 'target'), [(resnet, 0.5), (resnet, 0.7), (mobilenet, 0.6)])
def test_the_target_is_met(make, target, criterion):
    network, images = make(), torch.rand(2, 3, 64, 64)

    def loss(batch):
        out = network(batch)
        return (out[-1] if isinstance(out, tuple) else out).square().mean()

    told = fgc_mm.prune(network, criterion, target, [images], loss)
    assert told == pytest.approx(target, abs=0.01)
    assert executed(network, images) == pytest.approx(told)
    for gate in find_gates(network).values():
        assert gate.mask.mean() >= 0.1 and set(gate.mask.tolist()) <= {0.0, 1.0}


def test_what_is_worth_least_goes_first():
    network, images = mobilenet(), torch.rand(1, 3, 64, 64)
    conv = network.features[4].conv[0][0]
    with torch.no_grad():
        conv.weight[::2] *= 1e-3
    fgc_mm.prune(network, 'l2', 0.7, [images])
    mask = find_gates(network)['gates.features-4-conv-0-0'].mask
    assert not mask[::2].any() and mask[1::2].any()


@pytest.mark.parametrize('make', [resnet, mobilenet])
def test_it_slims_to_a_plain_network(make):
    network, images = make(), torch.rand(2, 3, 64, 64)
    share = fgc_mm.prune(network, 'random', 0.6, [images])
    network.eval()
    gates = find_gates(network)
    slimmed = slim(network, {name: gate.mask for name, gate in gates.items()}).model
    slimmed.eval()
    assert find_gates(slimmed) == {}
    before, after = network(images), slimmed(images)
    pairs = zip(before, after, strict=True) if isinstance(before, tuple) else [(before, after)]
    for one, other in pairs:
        torch.testing.assert_close(other, one)
    dense = count_macs(network, images)[0].model_dense
    assert count_macs(slimmed, images)[0].model_executed / dense == pytest.approx(share)


def test_what_is_closed_does_not_matter():
    network, images = resnet(), torch.rand(2, 3, 64, 64)
    fgc_mm.prune(network, 'random', 0.5, [images], seed=3)
    network.eval()
    before = network(images)
    with torch.no_grad():
        for name, site in network.gates.sites.items():
            closed = network.gates.of(name).mask == 0
            network.get_submodule(site.producers[0].module).weight[closed] = 7.0
    for one, other in zip(before, network(images), strict=True):
        assert torch.equal(one, other)


def test_random_depends_on_its_seed_alone():
    masks = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(masks))
        network = resnet()
        fgc_mm.prune(network, 'random', 0.5, [torch.rand(1, 3, 64, 64)], seed=seed)
        masks.append(torch.cat([gate.mask for gate in find_gates(network).values()]))
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


def test_a_floor_keeps_channels_everywhere():
    network, images = resnet(), torch.rand(1, 3, 64, 64)
    fgc_mm.prune(network, 'random', 0.75, [images], floor=0.6)
    assert min(float(gate.mask.mean()) for gate in find_gates(network).values()) >= 0.6


def test_a_pruned_network_learns_without_what_is_closed():
    network, images = mobilenet(), torch.rand(8, 3, 32, 32)
    labels = torch.arange(8) % 4
    fgc_mm.prune(
        network, 'taylor', 0.6, [(images, labels)], lambda b: F.cross_entropy(network(b[0]), b[1])
    )
    F.cross_entropy(network(images), labels).backward()
    site = network.gates.sites['features.4.conv.0.0']
    grad = network.get_submodule(site.name).weight.grad.flatten(1).abs().sum(dim=1)
    open_ = network.gates.of(site.name).mask > 0
    assert bool((grad[open_] > 0).any()) and not grad[~open_].any()


@pytest.mark.parametrize(
    ('gate', 'options', 'message'),
    [
        (STATIC, dict(criterion='l1'), r"criterion='l1' must be one of \('l2', 'taylor'"),
        (STATIC, dict(target=50), r'target=50 must be within \(0, 1\]'),
        (STATIC, dict(floor=1), r'floor=1 must be within \[0, 1\)'),
        (STATIC, dict(target=0.01), r'target=0.01 cannot be reached: with 0.1 of each gate open'),
        (STATIC, dict(backbone='body'), "backbone='body' is no part of ResNet"),
        (dict(type='BinConcreteGate'), {}, 'must have static gates, and gates.layer1-0-conv1 is a'),
        (None, {}, 'ResNet must have static gates; gate it with'),
    ],
)
def test_mistakes(gate, options, message):
    network = gated_resnet(18, base_channels=8, gate=gate)
    with pytest.raises(ValueError, match=message):
        fgc_mm.prune(
            network, **{'criterion': 'l2', 'target': 0.5, **options},
            batches=[torch.rand(1, 3, 64, 64)],
        )  # fmt: skip
