# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""From the config of a dense network to one of a gated network."""

import pytest
from mmengine.config import Config

from fgc_mm.errors import UsageError
from fgc_mm.gating.recipe import final_config, gated_model


def config(backbone, **more):
    return Config(dict(model=dict(type='Any', backbone=backbone, **more)))


def test_any_backbone_is_wrapped_and_its_start_forgotten():
    backbone = dict(
        type='ResNet', depth=50, frozen_stages=1, init_cfg=dict(type='Pretrained', checkpoint='x')
    )
    cfg = config(backbone, pretrained='y')
    model = gated_model(cfg, static=False, batch_size=2)
    inner = model.backbone.backbone
    assert model.backbone.type == 'Gated' and model.backbone.gate.norm_cfg.type == 'LN'
    assert inner.depth == 50 and inner.frozen_stages == -1 and inner.init_cfg is None
    assert 'pretrained' not in model and cfg.model.backbone.frozen_stages == 1
    assert gated_model(cfg, static=False, batch_size=64).backbone.gate.norm_cfg.type == 'BN1d'


def test_names_that_gate_keep_their_own():
    given = dict(type='FBSGate', density=0.5)
    for kind in ('GatedResNet', 'mmdet.GatedResNet', 'GatedResNetCifar'):
        cfg = config(dict(type=kind, depth=18, gate=given))
        assert gated_model(cfg, False, 2).backbone.gate == given
        assert gated_model(cfg, True, 2).backbone == dict(
            type=kind, depth=18, gate=dict(type='StaticGate')
        )
    cfg = config(dict(type='Gated', backbone=dict(type='VGG', depth=11), gate=None))
    assert gated_model(cfg, False, 2).backbone.gate.type == 'BinConcreteGate'


def test_a_whole_model_that_is_gated():
    inner = dict(type='Any', backbone=dict(type='ResNet', depth=18))
    cfg = Config(dict(model=dict(type='Gated', model=inner, gate=None)))
    assert gated_model(cfg, True, 2).gate.type == 'StaticGate'
    cfg.model.part = ['backbone', 'neck']
    with pytest.raises(UsageError, match='fgc gate gates backbones'):
        gated_model(cfg, True, 2)


def test_a_model_without_backbone():
    with pytest.raises(UsageError, match=r'model.backbone=None must be a dict'):
        gated_model(Config(dict(model=dict(type='Any'))), True, 2)


def test_the_config_that_comes_out():
    cfg = config(dict(type='ResNet', depth=18))
    cfg.custom_hooks = [dict(type='EMAHook'), dict(type='BudgetHook', target=0.9)]
    cfg.custom_imports = dict(imports='mine')
    cfg.work_dir = 'work'
    final = final_config(cfg, 0.5, False, 2, 'file.pth')
    assert [hook.type for hook in final.custom_hooks] == ['EMAHook', 'BudgetHook', 'GatedMACsHook']
    assert final.custom_hooks[1].target == 0.5 and final.load_from == 'file.pth'
    assert final.custom_imports.imports == ['mine', 'fgc_mm'] and 'work_dir' not in final
    static = final_config(cfg, 0.5, True, 2, 'file.pth')
    assert [hook.type for hook in static.custom_hooks] == ['EMAHook', 'GatedMACsHook']
