# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which steps are explained, and what becomes of the config of an earlier run."""

from pathlib import Path

import pytest
import torch
import torch.nn as nn
from left_hooks import hooks_on

from fgc_mm.errors import RunError
from fgc_mm.runtime.first_step import watch_first_steps


class Failing:
    """Fails in a step of the training."""

    def __init__(self, task, step):
        class Task(task):
            calls = 0

            def forward(self, *args, **kwargs):
                Task.calls += 1
                if Task.calls == step:
                    raise RuntimeError('cannot multiply')
                return super().forward(*args, **kwargs)

        self.model = Task()


@pytest.mark.parametrize(('step', 'kind'), [(1, RunError), (3, RuntimeError)])
def test_only_the_first_step_is_explained(step, kind, make_runner, toy):
    runner = make_runner(model=Failing(toy.task, step).model)
    object.__setattr__(runner.cfg, '_filename', '/elsewhere/mine.py')
    earlier = Path(runner.work_dir, 'mine.py')
    earlier.write_text('of an earlier run')
    watch_first_steps(runner)
    with pytest.raises(kind, match='cannot multiply') as caught:
        runner.train()
    explained_now = str(caught.value).startswith('the first training step failed: ')
    assert explained_now is (step == 1)
    # A run that began owns the work dir; one that did not leaves it as it was.
    assert (earlier.read_text() == 'of an earlier run') is (step == 1)


def test_the_layer_that_fails_is_named_and_then_no_longer_watched(make_runner, toy):
    class Task(toy.task):
        def __init__(self):
            super().__init__()
            self.wrong = nn.Sequential(nn.ReLU(), nn.Linear(5, 2))

        def forward(self, *args, **kwargs):
            return self.wrong(torch.ones(3, 4))

    runner = make_runner(model=Task())
    watch_first_steps(runner)
    with pytest.raises(RunError, match=r'step failed in wrong\.1: Linear\(in_features=5'):
        runner.train()
    assert not hooks_on(runner.model)
