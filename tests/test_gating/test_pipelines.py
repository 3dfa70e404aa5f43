# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Pipelines of the packages, on pictures alone."""

from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.utils import import_modules_from_strings

from fgc_mm.datasets import Pictures
from fgc_mm.errors import DataError
from fgc_mm.gating.pipelines import pipelines_of, without_annotations

LOAD = dict(type='LoadImageFromFile')


@pytest.fixture
def pictures(demo_root):
    return Pictures(folder=str(Path(demo_root, 'detection/VOCdevkit/digits/JPEGImages')))


@pytest.mark.parametrize(
    ('scope', 'name', 'dropped'),
    [
        ('mmdet', 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py', ['LoadAnnotations']),
        (
            'mmdet',
            'yolox/yolox_tiny_8xb8-300e_coco.py',
            ['LoadAnnotations', 'Mosaic', 'FilterAnnotations'],
        ),
        ('mmseg', 'pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py', ['LoadAnnotations']),
        ('mmpretrain', 'resnet/resnet18_8xb32_in1k.py', []),
    ],
)
def test_what_is_left_of_those_upstream(scope, name, dropped, pictures):
    import_modules_from_strings(f'{scope}.datasets')
    cfg = Config.fromstring(f"_base_ = '{scope}::{name}'", '.py')
    pipeline = pipelines_of(cfg.train_dataloader.dataset)
    kept, left_out = without_annotations(pipeline, pictures, scope)
    assert set(dropped) <= set(left_out) and (left_out or not dropped)
    assert kept[0]['type'] == 'LoadImageFromFile' and kept[-1]['type'].startswith('Pack')
    if scope == 'mmseg':
        (crop,) = (step for step in kept if step['type'] == 'RandomCrop')
        assert crop['cat_max_ratio'] == 1.0


def test_a_pipeline_that_gives_no_inputs(pictures):
    with pytest.raises(DataError, match='no pipeline runs on pictures alone'):
        without_annotations([LOAD], pictures, None)
