# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Whole detectors, segmentors and classifiers with gates in several parts, frozen."""

import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS
from small_tasks import (
    boxes_sample,
    class_sample,
    classifier,
    faster_rcnn,
    map_sample,
    register,
    retinanet,
    segmentor,
)
from torch.utils._pytree import tree_flatten

from fgc_mm.gates import find_gates
from fgc_mm.inference import freeze, frozen_report
from fgc_mm.macs import count_macs

pytestmark = pytest.mark.usefixtures('without_gradients')
TASKS = {
    'retinanet': ('mmdet', retinanet, boxes_sample, ('backbone', 'bbox_head')),
    'faster-rcnn': ('mmdet', faster_rcnn, boxes_sample, ('backbone', 'rpn_head', 'roi_head')),
    'segmentor': ('mmseg', segmentor, map_sample, ('backbone', 'decode_head')),
    'classifier': ('mmpretrain', classifier, class_sample, 'backbone'),
}
FIELDS = dict(mmdet='pred_instances', mmseg='seg_logits', mmpretrain='pred_score')


def build(name):
    scope, model, _, part = TASKS[name]
    register(scope)
    cfg = Config(dict(model=model())).model
    cfg['backbone'].pop('gate')
    cfg['backbone']['type'] = 'ResNet'
    torch.manual_seed(0)
    gated = MODELS.build(dict(type='Gated', model=cfg, part=part))
    gated.eval()
    for gate in find_gates(gated).values():
        nn.init.normal_(gate.fc2.weight, std=3)
        nn.init.zeros_(gate.fc2.bias)
    if name == 'faster-rcnn':
        # Scores of random weights are so close that rounding decides the order of proposals.
        for conv in (gated.rpn_head.rpn_cls, gated.rpn_head.rpn_reg):
            nn.init.zeros_(conv.weight)
    return gated


def run(name, model, pictures):
    """All figures a model predicts; of the detector with proposals those of its heads, since
    rounding decides which of many overlapping boxes are left."""
    scope, _, sample, _ = TASKS[name]
    heads, handles = [], []
    for head in ('rpn_head', 'roi_head.bbox_head') if name == 'faster-rcnn' else ():
        module = model.get_submodule(head)
        handles.append(module.register_forward_hook(lambda m, args, out: heads.append(out)))
    samples = [sample(*pictures.shape[2:]) for _ in pictures]
    found = [getattr(s, FIELDS[scope]) for s in model(pictures, samples, mode='predict')]
    for handle in handles:
        handle.remove()
    if heads:
        return [value for value in tree_flatten(heads)[0] if isinstance(value, torch.Tensor)]
    return [
        value
        for one in found
        for value in ([one] if isinstance(one, torch.Tensor) else one.values())
    ]


@pytest.mark.parametrize('name', TASKS)
def test_predictions_are_those_of_masks(name):
    gated = build(name)
    frozen = freeze(gated, way='gathered')
    run(name, frozen, torch.rand(1, 3, 64, 64))  # now it is prepared
    for batch, size in ((2, (64, 64)), (1, (64, 96))):
        pictures = torch.rand(batch, 3, *size)
        wanted, found = run(name, gated, pictures), run(name, frozen, pictures)
        masks = [gate.record.mask for gate in find_gates(gated).values()]
        assert 0.2 < torch.cat([mask.flatten() for mask in masks]).mean() < 0.8
        assert len(wanted) == len(found) > 0
        for have, want in zip(found, wanted, strict=True):
            assert have.shape == want.shape and want.numel()
            difference = (getattr(have, 'tensor', have) - getattr(want, 'tensor', want)).abs()
            assert difference.max() <= 1e-4 * getattr(want, 'tensor', want).abs().max()
    report = frozen_report(frozen)
    assert report.norms > 0 and report.masked == {}


@pytest.mark.parametrize('name', ['retinanet', 'faster-rcnn', 'segmentor'])
def test_macs_of_a_model_are_counted_the_same(name):
    gated = build(name)
    pictures = torch.rand(2, 3, 64, 64)
    samples = [TASKS[name][2](64, 64) for _ in pictures]
    frozen = freeze(gated, way='gathered')
    run(name, frozen, pictures)  # now it is prepared: linear layers too compute fewer channels
    wanted = count_macs(gated, pictures, samples, mode='predict')
    found = count_macs(frozen, pictures, samples, mode='predict')
    for have, want in zip(found, wanted, strict=True):
        assert have.model_executed == pytest.approx(want.model_executed)
        assert have.model_dense == pytest.approx(want.model_dense)
