# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sites of whole models, which are tried on data that nobody made."""

from mmengine.registry import MODELS
from small_tasks import register
from stock_models import merged, stock

from fgc_mm.sites.find import find_in_model


def test_an_assigner_that_would_read_masks_gets_none():
    register('mmdet')
    model = merged(
        stock('mmdet', 'rtmdet/rtmdet_tiny_8xb32-300e_coco.py'),
        backbone=dict(init_cfg=None),
        neck=dict(out_channels=16, num_csp_blocks=1),
        bbox_head=dict(in_channels=16, feat_channels=16, num_classes=2),
    )
    found = find_in_model(MODELS.build(model), (3, 64, 64))
    parts = {site.name.partition('.')[0] for site in found.sites}
    assert parts == {'backbone', 'neck', 'bbox_head'}
