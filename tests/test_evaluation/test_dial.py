# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The gate threshold as a dial."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from left_hooks import hooks_on
from mmengine.runner import Runner
from toy_task import BACKBONE, ToyTask

from fgc_mm.errors import UsageError
from fgc_mm.evaluation import ThresholdDial
from fgc_mm.evaluation.dial import calibration_batches
from fgc_mm.gates import find_gates
from fgc_mm.macs import count_macs


def task(**backbone):
    """Gates of all sorts: biases differ, too."""
    model = ToyTask(dict(BACKBONE, **backbone))
    for gate in find_gates(model).values():
        nn.init.normal_(gate.fc2.weight)
        nn.init.normal_(gate.fc2.bias)
    return model.eval()


@pytest.fixture
def batches():
    torch.manual_seed(0)
    return [dict(inputs=torch.randn(n, 3, size, size)) for n, size in ((4, 32), (2, 64))]


def test_a_budget_is_found(batches):
    model = task()
    dial = ThresholdDial(model, batches)
    thresholds = [dial.find(budget, tolerance=0.01) for budget in (0.45, 0.6, 0.8)]
    assert thresholds[0] > thresholds[1] > thresholds[2]
    for threshold, budget in zip(thresholds, (0.45, 0.6, 0.8), strict=True):
        for gate in find_gates(model).values():
            gate.threshold = threshold
        counted = [i for b in batches for i in count_macs(model, b['inputs'], backbone='backbone')]
        dense = sum(image.backbone_dense for image in counted)
        found = sum(image.backbone_executed for image in counted) / dense
        assert found == pytest.approx(budget, abs=0.011)
        assert found == pytest.approx(dial.share(threshold), abs=1e-9)
    assert not hooks_on(model)


def test_out_of_reach(batches):
    with pytest.raises(UsageError, match=r'budget=0.001 is out of reach: .* executes 0\.\d+ to 1'):
        ThresholdDial(task(), batches).find(0.001)


def test_nothing_to_turn(batches):
    with pytest.raises(ValueError, match='the calibration set is empty'):
        ThresholdDial(task(), [])
    with pytest.raises(ValueError, match='has no gates'):
        ThresholdDial(task(gate=None), batches).find(0.5)
    model = ToyTask(dict(BACKBONE, gate=dict(type='FBSGate')))
    with pytest.raises(ValueError, match=r'FBSGate .* has no threshold'):
        ThresholdDial(model.eval(), batches).find(0.5)


@pytest.mark.parametrize(('images', 'batches'), [(None, 3), (4, 2)])
def test_a_split_that_never_ends_is_calibrated_on_once(images, batches):
    loader = dict(
        batch_size=2, num_workers=0, dataset=[0] * 5, sampler=dict(type='InfiniteSampler')
    )
    runner = SimpleNamespace(
        cfg=dict(train_dataloader=loader), build_dataloader=Runner.build_dataloader
    )
    assert len(calibration_batches(runner, 'train', images)) == batches
