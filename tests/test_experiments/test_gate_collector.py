# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import uuid

import malicious
import numpy as np
import pytest
import torch
from gate_collector import GateCollectorHook, openness
from gate_tables import make_table
from mmengine.runner import Runner
from toy_task import BACKBONE, ToyImages, ToyTask

from fgc_mm.analysis.gate_table import GateTable
from fgc_mm.gates import find_gates


def runner_for(model, work_dir):
    return Runner(
        model=model,
        work_dir=str(work_dir),
        test_dataloader=dict(
            dataset=ToyImages(5),
            sampler=dict(type='DefaultSampler', shuffle=False),
            batch_size=2,
            num_workers=0,
        ),
        test_cfg=dict(),
        test_evaluator=[],
        default_hooks=dict(checkpoint=None, logger=None),
        experiment_name=f'test-{uuid.uuid4()}',
    )


def test_the_records_of_all_pictures(tmp_path):
    torch.manual_seed(0)
    model = ToyTask(dynamic=True)
    runner, collector = runner_for(model, tmp_path), GateCollectorHook()
    runner.register_hook(collector)
    for _ in range(2):  # a second pass starts anew
        runner.test()
        with torch.no_grad():
            model.backbone(ToyImages(5).images)
        expected = {name: gate.record for name, gate in find_gates(model).items()}
        assert list(collector.records) == list(expected)
        for name, record in expected.items():
            for field in ('logits', 'probs', 'mask', 'feature'):
                found = getattr(collector.records[name], field)
                torch.testing.assert_close(found, getattr(record, field), rtol=1e-4, atol=1e-5)
    masks = torch.cat([record.mask for record in expected.values()], dim=1)
    assert openness(collector.records) == pytest.approx(float(masks.mean()))
    assert 0 < openness(collector.records) < 1


def test_a_model_without_gates(tmp_path):
    runner = runner_for(ToyTask(dict(BACKBONE, gate=None)), tmp_path)
    runner.register_hook(GateCollectorHook())
    with pytest.raises(ValueError, match='the model ToyTask has no gates'):
        runner.test()


def test_a_cache_with_pickles_is_not_read(tmp_path):
    """An array of objects in place of one of numbers, which would make a folder."""
    make_table().save(tmp_path / 'cache.npz')
    with np.load(tmp_path / 'cache.npz') as arrays:
        content = dict(arrays)
    content['amount'] = np.array([malicious.Bomb(tmp_path / 'marker')], dtype=object)
    np.savez(tmp_path / 'cache.npz', **content)
    with pytest.raises(ValueError, match='allow_pickle=False'):
        GateTable.load(tmp_path / 'cache.npz')
    assert not (tmp_path / 'marker').exists()
