# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The share of a whole detector, whose heads decide for levels and regions."""

import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS
from small_tasks import boxes_sample, faster_rcnn, register, retinanet

from fgc_mm.gates import find_gates
from fgc_mm.macs import BackboneShare, count_macs
from fgc_mm.training.budget.reading import BatchReader
from fgc_mm.training.budget.task_pull import TaskPull

PARTS = {retinanet: ('backbone', 'bbox_head'), faster_rcnn: ('backbone', 'rpn_head', 'roi_head')}


@pytest.fixture(scope='module', params=PARTS, ids=lambda model: model.__name__)
def watched(request):
    """A detector with gates that depend on the picture, and the share of its last pass."""
    register('mmdet')
    torch.manual_seed(0)
    cfg = Config(dict(model=request.param())).model
    cfg.backbone.pop('gate')
    cfg.backbone.type = 'ResNet'
    model = MODELS.build(dict(type='Gated', model=cfg, part=PARTS[request.param])).eval()
    for gate in find_gates(model).values():
        nn.init.normal_(gate.fc2.weight, std=3)
        nn.init.zeros_(gate.fc2.bias)
    pictures = torch.rand(3, 3, 64, 64) * torch.tensor([0.2, 1, 4])[:, None, None, None]
    share = BackboneShare(model, '')
    share.attach()
    images = count_macs(model, pictures, [boxes_sample(64, 64) for _ in pictures], mode='predict')
    mean = sum(image.model_dense for image in images) / len(images)
    return model, share, [image.model_executed / mean for image in images]


def test_it_counts_as_evaluation_does(watched):
    _, share, counted = watched
    gates = list(share.gates.values())
    assert max(gate.calls for gate in gates) == 5 and len(gates) > 8
    found = share.of([gate.pass_record.mask.mean(dim=1) for gate in gates])
    assert found.tolist() == pytest.approx(counted, rel=1e-5)
    assert share.images == 3


def test_a_batch_is_read_at_what_it_costs(watched):
    _, share, counted = watched
    logits = [gate.pass_record.logits.detach() for gate in share.gates.values()]
    reader = BatchReader(share, logits, [False] * len(logits), floor=0.1)
    assert reader.hard.tolist() == pytest.approx(counted, rel=1e-5)
    goal = float(reader.hard.mean()) - 0.05
    shift = reader.solve(goal, trust=1.0, offset=0.0)
    assert -2 < float(shift) < 0
    moved = BatchReader(share, [a + shift for a in logits], [False] * len(logits))
    assert float(moved.hard.mean()) == pytest.approx(goal, abs=0.02)
    report = reader.report(shift, None, 0.0)
    channels = sum(gate.channels for gate in share.gates.values())
    assert len(report) == 6 + 2 * len(logits) + 2 * channels and report.isfinite().all()


def test_the_task_pulls_at_every_call(watched):
    """The gradient of the task, and not that of the loss on gates, from all calls of a gate."""
    _, share, _ = watched
    calls = [
        [r.logits.detach().clone().requires_grad_() for r in gate.pass_records]
        for gate in share.gates.values()
    ]
    pull = TaskPull()
    own = pull.watch(share, calls, [False] * len(calls))
    weights = [torch.rand_like(logits) for part in calls for logits in part]
    flat = [logits for part in calls for logits in part]
    task = sum((w * logits).sum() for w, logits in zip(weights, flat, strict=True))
    (task + 100 * sum(logits.square().sum() for logits in own)).backward()
    pull.take()
    rows, squares = iter(weights), []
    for part in calls:
        squares.append(torch.cat([next(rows) for _ in part]).square().mean(dim=0))
    expected = torch.cat(squares)
    found = pull.state_dict()['means'][0]
    torch.testing.assert_close(found, expected / expected.mean(), rtol=1e-3, atol=1e-3)
