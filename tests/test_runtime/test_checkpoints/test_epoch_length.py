# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Where schedules are looked for; test_safe_checkpoint_hook.py resumes with them."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.optim import StepLR

from fgc_mm.runtime.checkpoints.epoch_length import EpochLength


@pytest.mark.parametrize(
    'config',
    [
        dict(type='CosineAnnealingLR', T_max=6, by_epoch=True),
        [dict(type='StepLR', step_size=1)],
        dict(first=[dict(type='StepLR', step_size=1)]),
        None,
    ],
)
def test_schedules_that_were_not_built(config):
    """As the Runner has them where nothing is trained."""
    lengths = EpochLength()
    lengths.keep(SimpleNamespace(param_schedulers=config))
    assert lengths._fresh == []


@pytest.mark.parametrize('grouped', [False, True])
def test_schedules_of_one_optimizer_and_of_several(grouped):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedules = [StepLR(optimizer, step_size=1)]
    lengths = EpochLength()
    lengths.keep(SimpleNamespace(param_schedulers={'a': schedules} if grouped else schedules))
    assert [schedule for schedule, _, _ in lengths._fresh] == schedules
