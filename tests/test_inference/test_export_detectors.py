# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Detectors of mmdet other than the demo's: what exports, and what says that it does not."""

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.utils import import_modules_from_strings

from fgc_mm.gates import find_gates
from fgc_mm.inference import Picture, export

pytestmark = pytest.mark.usefixtures('without_gradients')

LEVELS = 5
SMALL_HEAD = dict(
    in_channels=16,
    feat_channels=16,
    stacked_convs=1,
    num_classes=3,
    norm_cfg=dict(type='GN', num_groups=4),
)
ONE_STAGE = {
    'retinanet/retinanet_r18_fpn_1x_coco.py': ('cls_score', 'bbox_pred'),
    'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py': ('cls_score', 'bbox_pred', 'head_2'),
}


def detector(base, **changes):
    """A detector of mmdet's with a tiny gated backbone."""
    init_default_scope('mmdet')
    import_modules_from_strings('mmdet.models')
    cfg = Config.fromstring(f"_base_ = 'mmdet::{base}'", '.py').model
    backbone = dict(type='mmdet.ResNet', depth=18, base_channels=8)
    cfg.backbone = dict(type='Gated', backbone=backbone)
    for key, value in changes.items():
        if isinstance(value, dict):
            cfg[key].update(value)
        else:
            cfg[key] = value
    torch.manual_seed(0)
    model = MODELS.build(cfg).eval()
    for gate in find_gates(model).values():
        nn.init.normal_(gate.fc2.weight)
        nn.init.zeros_(gate.fc2.bias)
    return model


@pytest.mark.parametrize('base', ONE_STAGE, ids=lambda base: base.split('/')[0])
def test_maps_of_a_dense_head_at_another_size(base):
    neck = dict(in_channels=[8, 16, 32, 64], out_channels=16)
    model = detector(base, neck=neck, bbox_head=SMALL_HEAD)
    result = export(model, [Picture(*[torch.randn(1, 3, 96, 64)] * 2)])
    assert 'not exported: anchors or points, box decoding and NMS' in result.notices
    session = onnxruntime.InferenceSession(result.content, providers=['CPUExecutionProvider'])
    names = [f'{name}_{level}' for name in ONE_STAGE[base] for level in range(LEVELS)]
    assert [out.name for out in session.get_outputs()] == names
    x = torch.randn(2, 3, 80, 112)
    outs = dict(zip(names, session.run(None, {'image': x.numpy()}), strict=True))
    wanted = model(x, mode='tensor')
    for name, maps in zip(ONE_STAGE[base], wanted, strict=True):
        for level, want in enumerate(maps):
            out = outs[f'{name}_{level}']
            assert out.shape == want.shape and want.abs().max() > 1e-3
            assert np.abs(out - want.numpy()).max() <= 1e-3


def test_detr_exports_its_backbone_alone():
    layers = dict(num_layers=1)
    model = detector(
        'detr/detr_r18_8xb2-500e_coco.py',
        neck=dict(in_channels=[64]),
        encoder=layers,
        decoder=layers,
        num_queries=4,
    )
    x = [Picture(*[torch.randn(1, 3, 64, 64)] * 2)]
    with pytest.raises(ValueError, match=r'model DETR is no .* alone \(--part backbone\)'):
        export(model, x)
    assert list(export(model, x, part='backbone').outputs) == [f'feature_{i}' for i in range(4)]


def test_a_head_that_takes_more_than_maps_is_one_message():
    model = detector(
        'sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py',
        neck=dict(in_channels=[8, 16, 32, 64]),
        type='TwoStageDetector',
        roi_head=None,
    )
    message = r'TwoStageDetector does not run on a picture of 64x64 .*\(--part backbone\)'
    with pytest.raises(ValueError, match=message):
        export(model, [Picture(*[torch.randn(1, 3, 64, 64)] * 2)])
