# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest
from mmengine.config import Config

from fgc_mm.evaluation import GatedMACsHook, counted_backbone
from fgc_mm.evaluation.summary import add_macs_hook


@pytest.mark.parametrize('kind', ['GatedMACsHook', 'fgc_mm.GatedMACsHook', GatedMACsHook])
def test_the_hook_of_a_config_stays_the_only_one(kind):
    """Also that of a new-style config, which has the class."""
    cfg = Config(dict(custom_hooks=[dict(type=kind, backbone='neck')]))
    assert counted_backbone(cfg) == 'neck'
    add_macs_hook(cfg)
    assert len(cfg.custom_hooks) == 1


def test_a_config_without_the_hook_gets_it():
    cfg = Config(dict(custom_hooks=[dict(type='L0Hook')]))
    assert counted_backbone(cfg) == 'backbone'
    add_macs_hook(cfg)
    assert [hook.type for hook in cfg.custom_hooks] == ['L0Hook', 'GatedMACsHook']
