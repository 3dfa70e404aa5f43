# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What holds for the gates of every family of backbones."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn
from mmengine.registry import MODELS

import fgc_mm  # noqa: F401
from fgc_mm.gates import find_gates, force_gates, gated_blocks

FAMILIES = {
    'cifar': dict(type='GatedResNetCifar', depth=20, base_channels=8),
    'wide': dict(type='GatedWideResNet', depth=10, widen_factor=1),
    'mobilenet': dict(type='mmpretrain.GatedMobileNetV2', widen_factor=0.35, stem_stride=1),
    'basic': dict(type='mmseg.GatedResNet', depth=18, base_channels=8, stem_channels=8),
    'bottleneck': dict(type='mmdet.GatedResNet', depth=50, base_channels=4, norm_eval=False),
}
LAST_STAGE = {'cifar': 3, 'wide': 3, 'mobilenet': 7, 'basic': 4, 'bottleneck': 4}

families = pytest.mark.parametrize('family', FAMILIES)


def build(family, **options):
    torch.manual_seed(0)
    return MODELS.build(dict(FAMILIES[family], **options))


def pictures(batch=2):
    return torch.randn(batch, 3, 48, 48, generator=torch.Generator().manual_seed(1))


def loss_of(outs):
    return sum(out.square().mean() for out in outs)


def sites(model):
    """Name of the gate, gate and site of every site."""
    for site in model.gates.sites.values():
        yield f'gates.{model.gates.name_of(site.name)}', model.gates.of(site.name), site


@families
def test_closed_channels_are_zero_where_they_are_consumed(family):
    model = build(family)
    masks = {
        name: (torch.rand(2, gate.channels) > 0.5).float()
        for name, gate in find_gates(model).items()
    }
    seen = {}
    for name, gate, site in sites(model):
        assert site.source in gated_blocks(model)
        consumer = model.get_submodule(site.consumers[-1].module)
        assert consumer.in_channels == gate.channels
        consumer.register_forward_pre_hook(
            lambda module, args, key=name: seen.__setitem__(key, args[0])
        )
    with torch.no_grad(), force_gates(model, masks):
        model(pictures())
    assert list(seen) == list(masks)
    for key, feature in seen.items():
        alive = feature.abs().amax(dim=(2, 3)) > 0
        assert not alive[masks[key] == 0].any(), key
        assert alive[masks[key] == 1].float().mean() > 0.5, key


@families
def test_what_a_site_names_is_what_a_closed_channel_spares(family):
    """Weights of closed channels may be anything in all convolutions named."""
    model = build(family)
    model.eval()
    masks = {
        name: (torch.rand(gate.channels) > 0.5).float() for name, gate in find_gates(model).items()
    }
    with torch.no_grad(), force_gates(model, masks):
        before = model(pictures())
        for name, _, site in sites(model):
            closed = masks[name] == 0
            for end in (*site.producers, *site.through):
                model.get_submodule(end.module).weight[closed] = 1e3
            for end in site.consumers:
                model.get_submodule(end.module).weight[:, closed] = 1e3
        after = model(pictures())
    for out, wanted in zip(after, before, strict=True):
        assert torch.equal(out, wanted)


@families
@pytest.mark.parametrize(
    'options',
    [
        dict(),
        dict(with_cp=True),
        dict(norm_eval=True),
        dict(frozen_stages='all'),
        dict(frozen_stages='all', norm_eval=True, with_cp=True),
    ],
    ids=['plain', 'with_cp', 'norm_eval', 'frozen', 'all'],
)
@pytest.mark.parametrize('batch', [1, 2])
def test_gates_learn(family, options, batch):
    options = dict(options)
    frozen = options.get('frozen_stages') == 'all'
    if frozen:
        options['frozen_stages'] = LAST_STAGE[family]
    model = build(family, **options)
    model.train()
    statistics = {
        name: module.running_mean.clone()
        for name, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    }
    loss_of(model(pictures(batch))).backward()
    for name, gate in find_gates(model).items():
        assert gate.training, name
        for weight in (gate.fc1.weight, gate.fc2.weight, gate.fc2.bias):
            assert weight.grad.isfinite().all() and weight.grad.abs().sum() > 0, name
        assert not gate.record.logits.requires_grad
    for name, param in model.named_parameters():
        stage = int(name[5]) if name.startswith('layer') else None
        if 'gate' not in name and stage is not None:
            assert (param.grad is None) == frozen, name
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d) and name.startswith('layer'):
            fixed = torch.equal(module.running_mean, statistics[name])
            assert fixed == (frozen or bool(options.get('norm_eval'))), name


@families
def test_gates_follow_the_freeze_if_asked(family):
    model = build(
        family, frozen_stages=LAST_STAGE[family], norm_eval=True, gates_follow_freeze=True
    )
    model.train()
    for gate in find_gates(model).values():
        assert not gate.training
        assert not any(param.requires_grad for param in gate.parameters())


@families
def test_checkpointing_changes_no_gradient(family):
    plain, checkpointed = build(family), build(family, with_cp=True)
    checkpointed.load_state_dict(plain.state_dict())
    for model in (plain, checkpointed):
        torch.manual_seed(5)
        model.train()
        loss_of(model(pictures())).backward()
    others = dict(checkpointed.named_parameters())
    for name, param in plain.named_parameters():
        assert (param.grad is None) == (others[name].grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(param.grad, others[name].grad, msg=name)


@families
def test_masks_in_evaluation_do_not_depend_on_the_batch(family):
    model = build(family)
    model.eval()
    for gate in find_gates(model).values():
        nn.init.normal_(gate.fc2.weight)
        nn.init.zeros_(gate.fc2.bias)
    x = pictures(4)
    with torch.no_grad():
        model(x)
        together = {name: gate.record.mask for name, gate in find_gates(model).items()}
        for i in (0, 3):
            model(x[i : i + 1])
            for name, gate in find_gates(model).items():
                assert torch.equal(gate.record.mask[0], together[name][i]), name
    openness = torch.cat([mask.flatten() for mask in together.values()]).mean()
    assert 0.1 < openness < 0.9


@families
def test_without_gates_the_names_are_the_same_and_nothing_is_left(family):
    gated, dense = build(family), build(family, gate=None)
    assert not find_gates(dense) and type(dense) is type(gated)
    names = [name for name in gated.state_dict() if not name.startswith('gates.')]
    assert list(dense.state_dict()) == names
    result = gated.load_state_dict(dense.state_dict(), strict=False)
    assert not result.unexpected_keys
    gates = tuple(f'{name}.' for name in find_gates(gated))
    assert all(key.startswith(gates) for key in result.missing_keys)
    with torch.no_grad(), force_gates(gated, 1.0):
        for out, wanted in zip(gated(pictures()), dense(pictures()), strict=True):
            assert torch.equal(out, wanted)


@families
def test_which_blocks_are_gated_is_a_config_value(family):
    last = f'layer{LAST_STAGE[family]}'
    every = list(gated_blocks(build(family)))
    stage = [name for name in every if name.startswith(f'{last}.')]
    assert list(gated_blocks(build(family, gated_blocks='last_stage'))) == stage
    assert list(gated_blocks(build(family, gated_blocks=last))) == stage
    assert list(gated_blocks(build(family, gated_blocks=[0, -1]))) == [every[0], every[-1]]


@families
def test_copies_and_pickles(family, tmp_path):
    model = build(family)
    loss_of(model(pictures())).backward()
    model.eval()
    with torch.no_grad():
        expected = model(pictures())
    torch.save(model, tmp_path / 'model.pth')
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / 'model.pth', weights_only=False),
    ]
    for other in copies:
        assert all(gate.record is None for gate in find_gates(other).values())
        with torch.no_grad():
            for out, wanted in zip(other(pictures()), expected, strict=True):
                assert torch.equal(out, wanted)


@families
def test_a_gated_backbone_keeps_its_gates_when_loaded_by_prefix(family, tmp_path):
    source = build(family)
    for gate in find_gates(source).values():
        nn.init.normal_(gate.fc2.bias)
    weights = {f'backbone.{key}': value for key, value in source.state_dict().items()}
    torch.save(dict(state_dict=weights), tmp_path / 'classifier.pth')
    init_cfg = dict(
        type='Pretrained', checkpoint=str(tmp_path / 'classifier.pth'), prefix='backbone.'
    )
    loaded = build(family, init_cfg=init_cfg)
    loaded.init_weights()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, weights[f'backbone.{name}']), name


@families
def test_initialization_leaves_the_gates_nearly_open(family):
    model = build(family, gate=dict(type='BinConcreteGate', bias_init=1.5))
    model.init_weights()
    for name, gate in find_gates(model).items():
        assert (gate.fc2.bias == 1.5).all(), name


@families
def test_half_precision(family):
    model = build(family)
    with torch.autocast('cpu', torch.bfloat16):
        loss_of(model(pictures())).backward()
    for name, gate in find_gates(model).items():
        assert gate.fc1.weight.grad.isfinite().all(), name
        assert gate.fc1.weight.grad.abs().sum() > 0, name
