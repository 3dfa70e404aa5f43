# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Budgets of detectors with gates in their heads."""

import math

import pytest
import torch
from mmengine import registry
from mmengine.config import Config
from small_tasks import (
    boxes_sample,
    faster_rcnn,
    make_runner,
    map_sample,
    register,
    retinanet,
    segmentor,
)

from fgc_mm.coupling import Coupling
from fgc_mm.gates import find_gates, select_blocks

BUDGET = dict(type='BudgetHook', target=0.7, cap=0.9, floor=0.1, check_interval=1, backbone='')
OTHERS = [
    dict(type='BatchShapingHook', zeta=0.75, history=2),
    dict(type='GatedMACsHook', backbone=''),
]
SIZES = [(50, 64), (64, 40), (32, 64), (64, 64)]
MODELS = {
    'retinanet': ('mmdet', retinanet, boxes_sample, ('backbone', 'bbox_head')),
    'faster-rcnn': ('mmdet', faster_rcnn, boxes_sample, ('backbone', 'rpn_head', 'roi_head')),
    'segmentor': ('mmseg', segmentor, map_sample, ('backbone', 'decode_head')),
}


def gated(name, **kwargs):
    scope, model, sample, part = MODELS[name]
    register(scope)
    cfg = model()
    gate = cfg['backbone'].pop('gate')
    cfg['backbone']['type'] = 'ResNet'
    return scope, dict(type='Gated', model=cfg, part=part, gate=gate), sample


@pytest.mark.parametrize('name', MODELS)
def test_two_steps_and_a_test(name, tmp_path):
    scope, model, sample = gated(name)
    sizes = SIZES if scope == 'mmdet' else [(64, 64)] * 4
    runner = make_runner(scope, model, sample, sizes, tmp_path, hooks=[BUDGET, *OTHERS])
    gates = find_gates(runner.model)
    before = {n: gate.fc2.weight.clone() for n, gate in gates.items()}
    runner.train()
    hub = runner.message_hub
    for figure in ('budget/share', 'budget/expected', 'budget/over_cap', 'gate/openness'):
        (values, _) = hub.get_scalar(f'train/{figure}').data
        assert len(values) == 2 and all(map(math.isfinite, values)), figure
    assert hub.get_scalar('train/loss_batch_shaping').current() > 0
    # The optimizer reaches every gate that runs, those of heads among them.
    ran = {n for n, gate in gates.items() if gate.record is not None}
    heads = {n for n in ran if not n.startswith('backbone')}
    assert len(heads) >= 2 and len(ran) >= 10
    assert all(not torch.equal(gates[n].fc2.weight, before[n]) for n in ran)
    # MACs of the whole model fall when gates close.
    for gate in gates.values():
        torch.nn.init.constant_(gate.fc2.bias, 9)
    opened = runner.test()
    for n in heads:
        torch.nn.init.constant_(gates[n].fc2.bias, -99)
    closed = runner.test()
    assert closed['macs/model_dense_G'] == pytest.approx(opened['macs/model_dense_G'], rel=1e-3)
    assert closed['macs/model_executed_G'] < 0.98 * opened['macs/model_executed_G']
    assert closed['macs/pruning_ratio'] == pytest.approx(
        100 * (1 - closed['macs/model_executed_G'] / closed['macs/model_dense_G'])
    )


def test_a_gate_of_regions_is_not_coupled():
    _, cfg, _ = gated('faster-rcnn')
    model = registry.MODELS.build(Config(dict(model=cfg)).model)
    assert [n for block in select_blocks(model, 'last_stage').values() for n, _ in block] == [
        f'backbone.gates.layer4-{block}-conv1' for block in (0, 1)
    ]
    for layers in ('roi_head.bbox_head.shared_fcs.1', 'rpn_head.rpn_conv'):
        words = f"'{layers}' names no block.*; rpn_head.rpn_conv, .* for each level or region"
        with pytest.raises(ValueError, match=words):
            Coupling(model, num_instances=9, layers=layers, k=2)
