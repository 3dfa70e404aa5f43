# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Densities that fall while a network trains."""

import pytest
import torch
from mmengine.hooks import Hook

from fgc_mm.errors import UsageError
from fgc_mm.gates import find_gates
from fgc_mm.training import DensityHook

FBS = dict(
    type='mmdet.GatedResNet',
    depth=18,
    base_channels=8,
    stem_channels=8,
    norm_eval=False,
    gate=dict(type='FBSGate', density=0.25, weight_scale=0.01),
)


class Watch(Hook):
    """How many channels are open in training, and what evaluation after each step opens."""

    priority = 'VERY_LOW'

    def __init__(self, fail_at=None):
        self.open, self.evaluated, self.fail_at = [], [], fail_at

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.fail_at:
            raise RuntimeError('interrupted')

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        gates = find_gates(runner.model).values()
        self.open.append({float(gate.record.mask.mean()) for gate in gates})
        runner.model.eval()
        with torch.no_grad():
            runner.model(torch.randn(2, 3, 32, 32))
        runner.model.train()
        self.evaluated.append({float(gate.record.mask.mean()) for gate in gates})


def test_density_falls_and_evaluation_has_the_gates_own(make_runner, toy):
    watch = Watch()  # 12 pictures in 3 steps, an epoch
    runner = make_runner([dict(type='DensityHook', epochs=2 / 3), watch], model=toy.task(FBS))
    runner.train()
    assert watch.open == [{1.0}, {0.625}, {0.25}]
    assert watch.evaluated == [{0.25}] * 3
    assert all(gate.training_density is None for gate in find_gates(runner.model).values())


def test_after_an_interrupted_training_it_starts_anew(make_runner, toy):
    model = toy.task(FBS)
    with pytest.raises(RuntimeError, match='interrupted'):
        make_runner([dict(type='DensityHook', epochs=1), Watch(fail_at=1)], model=model).train()
    watch = Watch()
    make_runner([dict(type='DensityHook', epochs=2 / 3), watch], model=model).train()
    assert watch.open == [{1.0}, {0.625}, {0.25}]
    assert watch.evaluated == [{0.25}] * 3


def test_at_once(make_runner, toy):
    watch = Watch()
    make_runner([dict(type='DensityHook', epochs=0), watch], model=toy.task(FBS)).train()
    assert watch.open == [{0.25}] * 3


@pytest.mark.parametrize(('epochs', 'left'), [(2, '67%'), (1, '33%'), (0.5, None)])
def test_a_training_that_is_too_short_is_said(epochs, left, make_runner, toy):
    runner = make_runner([dict(type='DensityHook', epochs=epochs)], model=toy.task(FBS))
    warned = []
    runner.logger.warning = lambda text, *args: warned.append(text)
    runner.train()
    said = [text for text in warned if text.startswith('DensityHook')]
    assert len(said) == (left is not None)
    for text in said:
        assert f'epochs={epochs} is too long' in text and f'{left} of the way' in text


def test_gates_that_learn_their_share_are_refused(make_runner):
    with pytest.raises(UsageError, match=r'the model has no FBSGate.*BudgetHook'):
        make_runner([dict(type='DensityHook')]).train()


@pytest.mark.parametrize('epochs', [-1, 'two', None, float('nan'), float('inf'), True])
def test_bad_epochs(epochs):
    with pytest.raises(ValueError, match=rf'epochs={epochs!r} must be a number of epochs, 0 or'):
        DensityHook(epochs=epochs)
