# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Slimmed networks are smaller and compute the same."""

import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS
from small_tasks import register, retinanet
from torchvision.models import MobileNetV3
from torchvision.models.mobilenetv3 import InvertedResidualConfig

import fgc_mm
from fgc_mm.gates import find_gates, force_gates
from fgc_mm.inference import GateUsage, slim
from fgc_mm.inference.slim_files import slim_config
from fgc_mm.macs import count_macs

FAMILIES = {
    'wide': dict(type='GatedWideResNet', depth=10, widen_factor=1),
    'basic': dict(type='GatedResNet', depth=18, base_channels=8, _scope_='mmdet'),
    'bottleneck': dict(
        type='Gated',
        backbone=dict(
            type='mmdet.ResNetV1d',
            depth=50,
            base_channels=8,
            num_stages=2,
            strides=(1, 2),
            dilations=(1, 2),
            out_indices=(0, 1),
        ),
    ),
}
SIZE = (48, 48)


def vgg():
    """Its gates read what other gates have closed."""
    layers = []
    for ins, outs in ((3, 8), (8, 12), (12, 10)):
        layers += [nn.Conv2d(ins, outs, 3, 2, 1), nn.BatchNorm2d(outs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(360, 16), nn.ReLU(), nn.Linear(16, 4))


def squeezed():
    settings = [(16, 3, 16, 16, True, 'RE', 2, 1), (16, 5, 72, 24, True, 'HS', 2, 1)]
    return MobileNetV3([InvertedResidualConfig(*row, 1.0) for row in settings], 32, 10)


def build(family, **options):
    """A network in evaluation mode whose norms and gates do something."""
    torch.manual_seed(0)
    if family in FAMILIES:
        model = MODELS.build(dict(FAMILIES[family], **options))
    else:
        net = vgg() if family == 'vgg' else squeezed()
        model = fgc_mm.gate(net, torch.rand(1, 3, *SIZE), **options)
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.5)
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    for gate in find_gates(model).values():
        if hasattr(gate, 'fc2'):
            nn.init.normal_(gate.fc2.weight)
            nn.init.zeros_(gate.fc2.bias)
    return model


def pictures(batch=4):
    """Pictures of different contrast and color: their gates differ."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.linspace(0.3, 3, batch)[:, None, None, None]
    color = 2 * torch.randn(batch, 3, 1, 1, generator=generator)
    return torch.randn(batch, 3, *SIZE, generator=generator) * scale + color


def assert_same(outs, wanted):
    outs, wanted = ([o] if isinstance(o, torch.Tensor) else o for o in (outs, wanted))
    for out, want in zip(outs, wanted, strict=True):
        assert (out - want).abs().max() <= 1e-4 * want.abs().max()
        assert want.std() > 0


def shares_of(model, x):
    usage = GateUsage(model)
    usage.attach()
    for picture in x.split(3):
        model(picture)
    usage.detach()
    model(x[:1])  # is not counted any more
    return usage.shares()


def parameters(model):
    return sum(param.numel() for param in model.parameters())


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize('family', [*FAMILIES, 'vgg', 'squeezed'])
def test_calibration_pictures_give_the_same_and_cost_less(family):
    model = build(family)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = pictures()
    wanted = model(x)
    shares = shares_of(model, x)
    result = slim(model, shares)
    assert_same(result.model(x), wanted)
    assert parameters(result.model) < 0.95 * parameters(model)
    for old, new in zip(count_macs(model, x), count_macs(result.model, x), strict=True):
        assert new.model_dense < 0.95 * old.model_dense
        assert new.model_executed <= old.model_executed
    for row in result.gates:
        share = shares[row['gate']]
        assert row['removed'] == min(int((share == 0).sum()), row['channels'] - 1)
        assert row['always_open'] == int((share == 1).sum())
        assert row['kept_because'] is None
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    # Slimmed again, for fewer pictures.
    again = slim(result.model, shares_of(result.model, x[:1]))
    assert parameters(again.model) < parameters(result.model)
    assert_same(again.model(x[:1]), [o[:1] for o in wanted] if family in FAMILIES else wanted[:1])
    if family in FAMILIES:  # a config builds both
        cfg = Config(dict(model=dict(FAMILIES[family])))
        for slimmed in (result, again):
            cfg = slim_config(cfg, slimmed)
            built = MODELS.build(cfg.model.to_dict())
            built.eval()
            built.load_state_dict(slimmed.model.state_dict())
            assert_same(built(x), slimmed.model(x))


@pytest.mark.parametrize('part', ['bbox_head', ('backbone', 'bbox_head')])
def test_parts_of_a_whole_model(part):
    register('mmdet')
    cfg = retinanet()
    cfg['backbone'].pop('gate')
    cfg['backbone']['type'] = 'ResNet'
    cfg['bbox_head']['stacked_convs'] = 2
    cfg = Config(dict(model=dict(type='Gated', model=cfg, part=part)))
    torch.manual_seed(0)
    model = MODELS.build(cfg.model).eval()
    for gate in find_gates(model).values():
        nn.init.normal_(gate.fc2.weight)
        gate.fc2.bias.copy_(torch.linspace(-9, 9, gate.channels))
    x = torch.randn(2, 3, 64, 64)

    def run(net):
        return [out for outs in net(x, mode='tensor') for out in outs]

    wanted = run(model)
    usage = GateUsage(model)
    usage.attach()
    run(model)
    usage.detach()
    result = slim(model, usage.shares())
    assert set(result.networks) == ({part} if isinstance(part, str) else set(part))
    assert any(row['removed'] for row in result.gates if row['gate'].startswith('bbox_head'))
    assert not any(row['kept_because'] for row in result.gates)
    built = MODELS.build(slim_config(cfg, result).model).eval()
    built.load_state_dict(result.model.state_dict())
    assert_same(run(result.model), wanted)
    assert_same(run(built), wanted)


def test_what_is_always_open_stays_open_for_other_pictures():
    model = build('basic')
    shares = shares_of(model, pictures())
    smaller = slim(model, shares).model
    smaller.train()  # noise cannot close it
    smaller(100 * torch.randn(6, 3, 32, 32))
    assert any((share == 1).any() and not (share >= 1).all() for share in shares.values())
    for name, gate in find_gates(smaller).items():
        kept = shares[name][shares[name] > 0]
        assert (gate.record.mask[:, kept == 1] == 1).all(), name


def test_shares_are_counted_over_all_pictures():
    model = build('basic')
    x = pictures()
    model(x)
    masks = {name: gate.record.mask for name, gate in find_gates(model).items()}
    for name, share in shares_of(model, x).items():
        assert torch.equal(share, masks[name].mean(dim=0)), name


def test_tolerance_removes_more():
    model = build('basic')
    shares = shares_of(model, pictures(8))
    exact, more = slim(model, shares), slim(model, shares, tolerance=0.3)
    assert sum(r['removed'] for r in more.gates) > sum(r['removed'] for r in exact.gates)
    for row in more.gates:
        assert row['removed'] == min(int((shares[row['gate']] <= 0.3).sum()), row['channels'] - 1)
    more.model(pictures(2))


@pytest.mark.parametrize('family', ['wide', 'vgg'])
def test_closed_gates_leave_one_channel_open_ones_no_gate(family):
    model = build(family)
    x = pictures(2)
    with force_gates(model, 1.0):
        wanted = model(x)
        dense = slim(model, shares_of(model, x)).model
    assert not find_gates(dense) and not hasattr(dense, 'gates')
    assert_same(dense(x), wanted)
    for gate in find_gates(model).values():
        gate.fc2.weight.zero_()
        gate.fc2.bias.fill_(-1)
    wanted = model(x)
    result = slim(model, shares_of(model, x))
    assert torch.cat([o.flatten() for o in result.model(x)]).isfinite().all()
    if family == 'wide':
        assert_same(result.model(x), wanted)
    assert all(row['removed'] == row['channels'] - 1 for row in result.gates)


def test_static_gates_leave_a_plain_network():
    model = build('vgg', gate=dict(type='StaticGate'))
    for gate in find_gates(model).values():
        gate.mask[1::2] = 0
    x = pictures()
    result = slim(model, shares_of(model, x))
    assert not find_gates(result.model) and type(result.model) is nn.Sequential
    assert [layer.out_channels for layer in result.model if isinstance(layer, nn.Conv2d)][1:] == [
        6,
        5,
    ]
    assert_same(result.model(x), model(x))


class Shuffled(nn.Module):
    """The channels of its second layer are shuffled by a view of a fixed size."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.second = nn.Conv2d(8, 8, 1)
        self.third = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.second(self.first(x))
        x = x.view(x.size(0), 2, 4, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
        return self.third(x)


def test_what_cannot_be_narrowed_keeps_its_gate():
    torch.manual_seed(0)
    model = fgc_mm.gate(Shuffled().eval(), torch.rand(1, 3, 8, 8), sites=['first', 'second'])
    for gate in find_gates(model).values():
        nn.init.normal_(gate.fc2.weight, std=3)
        gate.fc2.bias.copy_(torch.linspace(-40, 40, 8))
    x = pictures()
    result = slim(model, shares_of(model, x))
    first, second = result.gates
    assert first['removed'] > 0 and first['kept_because'] is None
    assert second['removed'] == 0 and 'does not run' in second['kept_because']
    assert_same(result.model(x), model(x))


def test_what_cannot_be_slimmed_is_named():
    with pytest.raises(ValueError, match='has no gates, so nothing can be slimmed'):
        slim(build('basic', gate=None), {})
    with pytest.raises(ValueError, match='tolerance=1 must be'):
        slim(build('basic'), {}, tolerance=1)
    model = build('basic', gate=dict(type='FBSGate'))
    with pytest.raises(ValueError, match='FBSGate cannot be slimmed'):
        slim(model, shares_of(model, pictures(2)))
    with pytest.raises(ValueError, match='has decided for no image'):
        GateUsage(build('basic')).shares()
