# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A config that inherits one network and names another."""

import pytest
from mmengine.config import Config

import fgc_mm  # noqa: F401
from fgc_mm.nets.swaps import check_swaps, types_of

SE = 'mmpretrain::_base_/models/seresnet50.py'
RESNET = 'mmpretrain::_base_/models/resnet50.py'
V1C = 'mmseg::_base_/models/pspnet_r50-d8.py'


def read(tmp_path, base, text, more=None):
    for name, content in {'a.py': f'_base_ = {base!r}\n{text}', 'b.py': more}.items():
        if content is not None:
            (tmp_path / name).write_text(content)
    return Config.fromfile(tmp_path / ('b.py' if more else 'a.py'))


def check(cfg):
    check_swaps(cfg, types_of(cfg.model))


@pytest.mark.parametrize(
    ('base', 'text', 'said'),
    [
        (SE, "dict(type='GatedResNet')", "'SEResNet' .*type='Gated', backbone=_base_.model.backb"),
        (SE, "{'type': 'mmpretrain.GatedResNet', 'gate': None}", "type='SEResNet'"),
        (V1C, "dict(type='GatedResNet', depth=18)", "'ResNetV1c' .* write type='GatedResNetV1c'"),
        (RESNET, "dict(type='GatedResNetV1d')", "'ResNet' .* write type='GatedResNet', or"),
    ],
)
def test_another_network_is_refused(base, text, said, tmp_path):
    with pytest.raises(ValueError, match=rf'a.py: model.backbone.type=.* written over .*{said}'):
        check(read(tmp_path, base, f'model = dict(backbone={text})'))


def test_also_further_down(tmp_path):
    text = "model = dict(backbone=dict(type='GatedResNet'))"
    more = "_base_ = ['a.py']\nmodel = dict(backbone=dict(gate=None))"
    with pytest.raises(ValueError, match=r"a.py: .*type='SEResNet'"):
        check(read(tmp_path, SE, text, more))


@pytest.mark.parametrize(
    ('base', 'text'),
    [
        (RESNET, "dict(type='GatedResNet')"),
        (V1C, "dict(type='GatedResNetV1c')"),
        (SE, "dict(_delete_=True, type='GatedResNet', depth=50, out_indices=(3,))"),
        (SE, "dict(_delete_=True, type='Gated', backbone=_base_.model.backbone)"),
        (RESNET, "dict(type='GatedResNet', **dict(depth=18))"),
        (RESNET, "dict(dict(type='GatedResNet'))"),
    ],
)
def test_the_same_network_and_a_fresh_start_are_fine(base, text, tmp_path):
    check(read(tmp_path, base, f'model = dict(backbone={text})'))


def test_the_command_line(tmp_path):
    cfg = read(tmp_path, SE, '')
    before = types_of(cfg.model)
    assert before[('backbone',)] == 'SEResNet'
    cfg.merge_from_dict({'model.backbone.type': 'GatedResNet'})
    with pytest.raises(ValueError, match=r"--cfg-options: .* over the type='SEResNet' of .*a.py"):
        check_swaps(cfg, before)


def test_a_part_of_a_part(tmp_path):
    text = "model = dict(detector=dict(backbone=dict(type='GatedResNet', arch='tiny')))"
    (tmp_path / 'base.py').write_text(
        "model = dict(detector=dict(backbone=dict(type='SwinTransformer', arch='tiny')))"
    )
    with pytest.raises(ValueError, match=r"model.detector.backbone.type=.* type='SwinTransformer'"):
        check(read(tmp_path, 'base.py', text))
