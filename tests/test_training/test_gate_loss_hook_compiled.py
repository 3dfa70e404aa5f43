# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Losses on gates in a Runner that compiles the training step."""

import pytest
from mmengine.runner import Runner
from toy_task import clean_up, digits_cfg  # noqa: F401

HOOKS = [
    dict(type='BudgetHook', target=0.5),
    dict(type='FGCHook', layers='last_stage', k=2, eta=0.1),
]


@pytest.mark.slow
def test_a_compiled_training_is_the_same(digits_cfg):  # noqa: F811
    losses = []
    for how in (False, dict(backend='aot_eager')):
        cfg = digits_cfg(HOOKS, max_epochs=1, work_dir=f'run{bool(how)}', compile=how)
        runner = Runner.from_cfg(cfg)
        runner.train()
        logged = runner.message_hub.log_scalars
        losses.append({
            name: list(logged[f'train/{name}'].data[0])
            for name in ('loss_task', 'loss_budget', 'loss_fgc')
        })  # fmt: skip
    plain, compiled = losses
    for name, values in plain.items():
        assert len(values) > 1 and any(values)
        assert compiled[name] == pytest.approx(values, rel=1e-3)
