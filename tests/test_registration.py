# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS

import fgc_mm  # noqa: F401


@pytest.mark.parametrize(
    ('base', 'model'),
    [
        ('mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py', 'FasterRCNN'),
        ('mmseg::pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py', 'EncoderDecoder'),
        ('mmpretrain::resnet/resnet18_8xb16_cifar10.py', 'ImageClassifier'),
    ],
)
def test_bases_of_every_task_package_resolve(base, model):
    assert Config.fromstring(f'_base_ = {base!r}', '.py').model.type == model


@pytest.mark.parametrize('scope', ['mmengine', 'mmdet', 'mmseg', 'mmpretrain'])
@pytest.mark.parametrize(
    ('registry', 'name'),
    [
        (MODELS, 'GatedResNet'),
        (MODELS, 'BinConcreteGate'),
        (HOOKS, 'L0Hook'),
        (METRICS, 'GatedMACs'),
        (DATASETS, 'CIFARBinary'),
    ],
)
def test_everything_is_found_by_its_plain_name_in_every_scope(scope, registry, name):
    with registry.switch_scope_and_registry(scope) as scoped:
        assert scoped.get(name) is not None
