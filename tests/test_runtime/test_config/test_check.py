# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What is refused before anything is built, and what is not."""

import warnings
from pathlib import Path

import mmdet
import mmpretrain
import mmseg
import pytest
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import HOOKS, MODELS

from fgc_mm.errors import UsageError
from fgc_mm.runtime.config.check import check_config

PROJECT = Path(__file__).parents[3]
ALL = ('train', 'val', 'test')
OWN = sorted(path for path in (PROJECT / 'configs').rglob('*.py') if '_base_' not in path.parts)
# Of the packages, among them those that do unusual things with the keys of what they build.
STOCK = {
    mmdet: 'albu_example atss cascade_rcnn centernet cityscapes convnext dcn deformable_detr detr '
    'dyhead fcos gn+ws htc lvis mask2former mask_rcnn pascal_voc pisa point_rend rtmdet '
    'soft_teacher sparse_rcnn ssd yolox',
    mmseg: 'beit ccnet convnext deeplabv3plus fastscnn hrnet icnet knet mask2former ocrnet '
    'point_rend segformer sem_fpn unet',
    mmpretrain: 'arcface byol convnext csra deit efficientnet mae mobilenet_v3 mvit resnet simclr '
    'swin_transformer vision_transformer',
}


def stock():
    """A config of each of these folders."""
    for package, names in STOCK.items():
        for name in names.split():
            folder = Path(package.__file__).parent / '.mim' / 'configs' / name
            yield pytest.param(min(folder.glob('*.py')), id=f'{package.__name__}/{name}')


def read(path):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return Config.fromfile(path)


@pytest.mark.parametrize('path', [pytest.param(p, id=str(p.relative_to(PROJECT))) for p in OWN])
def test_our_configs_are_in_order(path):
    check_config(read(path), ALL)


@pytest.mark.parametrize('path', list(stock()))
def test_configs_of_the_packages_are_in_order(path):
    check_config(read(path), ALL)


@pytest.fixture
def cfg():
    return read(PROJECT / 'configs/demo/faster_rcnn_r18_digits_gated.py')


@pytest.mark.parametrize(
    ('options', 'message'),
    [  # beside those of tests/test_cli/bad_input.txt
        ({'model.backbone.dept': 18}, "model.backbone.dept=18: GatedResNet has no argument 'dept'"),
        (
            {'model.roi_head.bbox_head.type': 'Nothing'},
            "model.roi_head.bbox_head.type='Nothing' is not in the model registry; a class of your",
        ),
        ({'model.rpn_head.loss_cls.type': 'L2'}, "model.rpn_head.loss_cls.type='L2' is not in"),
        ({'model.neck.norm_cfg': dict(type='BN9')}, "model.neck.norm_cfg.type='BN9' is not in"),
        (
            {
                'optim_wrapper': dict(
                    _delete_=True,
                    optimizer=dict(type='Adam', lr=1e-3),
                    paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=10, decay_mult=0.0)}),
                )
            },
            'optim_wrapper.paramwise_cfg.custom_keys.gate.decay_mult has nothing to multiply: '
            'optim_wrapper.optimizer (Adam) has no weight_decay; drop decay_mult, or give',
        ),
        (
            {
                'optim_wrapper': dict(
                    _delete_=True,
                    optimizer=dict(type='Adam', lr=1e-3),
                    paramwise_cfg=dict(norm_decay_mult=0.0),
                )
            },
            'optim_wrapper.paramwise_cfg.norm_decay_mult has nothing to multiply',
        ),
        ({'default_hooks.timer.typ': 1}, "IterTimerHook has no argument 'typ'"),
        ({'train_dataloader.sampler.shufle': 1}, "has no argument 'shufle'; did you mean 'shuffle"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(options, message, cfg):
    cfg.merge_from_dict(options)
    with pytest.raises(UsageError) as caught:
        check_config(cfg, ALL)
    assert message in str(caught.value)


def test_all_mistakes_are_told_together(cfg):
    cfg.merge_from_dict({'model.backbone.dept': 18, 'custom_hooks.0.rhoo': 1})
    with pytest.raises(UsageError) as caught:
        check_config(cfg, ALL)
    assert len(str(caught.value).splitlines()) == 2


def test_what_is_not_used_may_be_wrong(cfg):
    cfg.train_dataloader.dataset.type = cfg.optim_wrapper.optimizer.type = 'Nothing'
    check_config(cfg, ('test',))


def test_what_a_class_of_the_user_makes_of_its_keys_is_its_own_affair(cfg):
    class Any(nn.Module):
        def __init__(self, backbone, head='linear', **kwargs):
            super().__init__()

    def some_head(width):
        return nn.Linear(width, 2)

    MODELS.register_module('SomeHead', module=some_head)
    HOOKS.register_module('MyHook', module=type('MyHook', (), {'__init__': lambda self, a: None}))
    try:
        cfg.model = dict(type=Any, backbone=dict(type='dense', dept=3), head='linear', other=1)
        cfg.custom_hooks = [
            dict(type='MyHook', a=1, priority='LOW'),
            dict(type='mmdet.NumClassCheckHook'),
        ]
        check_config(cfg, ALL)
        cfg.model = dict(
            type='FasterRCNN', rpn_head=dict(type='SomeHead', anything=1), _scope_='mmdet'
        )
        check_config(cfg, ALL)
        cfg.custom_hooks = [dict(type='MyHook', b=1)]
        with pytest.raises(UsageError, match="MyHook has no argument 'b'; it has a"):
            check_config(cfg, ALL)
    finally:
        MODELS.module_dict.pop('SomeHead')
        HOOKS.module_dict.pop('MyHook')


def test_a_runner_of_the_user_builds_what_it_wants(cfg):
    cfg.runner_type, cfg.model = 'MyRunner', dict(type='Nothing')
    check_config(cfg, ALL)
