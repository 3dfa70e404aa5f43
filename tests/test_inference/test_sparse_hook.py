# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Validation and testing with a frozen model, and the model afterward."""

import copy

import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EMAHook, Hook
from toy_task import ToyImages, ToyTask, clean_up, make_runner  # noqa: F401

from fgc_mm.gates import find_gates
from fgc_mm.inference import SparseInferenceHook
from fgc_mm.inference.freeze import RootForward
from fgc_mm.training import BudgetHook


class Scores(BaseMetric):
    """Keeps the predictions."""

    seen: list = []

    def process(self, data_batch, data_samples):
        self.results += [sample['score'].clone() for sample in data_samples]

    def compute_metrics(self, results):
        Scores.seen.append(torch.stack(results))
        return dict(mean=float(torch.stack(results).mean()))


class Frozen(Hook):
    """Whether the model was frozen while it was run."""

    def __init__(self):
        self.seen = []

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen.append(isinstance(runner.model.__dict__.get('forward'), RootForward))

    after_test_iter = after_val_iter


def loader():
    return dict(
        dataset=ToyImages(5), sampler=dict(type='DefaultSampler', shuffle=False),
        batch_size=2, num_workers=0,
    )  # fmt: skip


def evaluation(name):
    return {
        f'{name}_dataloader': loader(),
        f'{name}_cfg': dict(),
        f'{name}_evaluator': dict(type=Scores),
    }


def hooks_of(model):
    return {
        name: [type(hook).__name__ for hook in module._forward_pre_hooks.values()]
        for name, module in model.named_modules()
    }


@pytest.mark.usefixtures('clean_up')
def test_a_test_gives_the_same_and_leaves_the_model(make_runner):  # noqa: F811
    model = ToyTask(dynamic=True)
    Scores.seen = []
    watch = Frozen()
    make_runner(model=copy.deepcopy(model), **evaluation('test')).test()
    own = copy.deepcopy(model)
    before, hooks = copy.deepcopy(own.state_dict()), hooks_of(own)
    make_runner([SparseInferenceHook(), watch], model=own, **evaluation('test')).test()
    masked, frozen = Scores.seen
    assert (masked - frozen).abs().max() <= 1e-4 * masked.abs().max()
    assert watch.seen == [True] * 3
    assert not any('forward' in module.__dict__ for module in own.modules())
    assert hooks_of(own) == hooks
    for name, value in own.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.usefixtures('clean_up')
def test_validation_takes_the_averaged_weights(make_runner):  # noqa: F811
    """The weights that EMAHook puts in for the time of a validation."""
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        Scores.seen = []
        hooks = [EMAHook(momentum=0.5), *([SparseInferenceHook()] if sparse else [])]
        runner = make_runner(
            hooks, model=ToyTask(dynamic=True), randomness=dict(seed=3), **evaluation('val')
        )
        runner.train()
        found.append(Scores.seen[-1])
        assert not any('forward' in module.__dict__ for module in runner.model.modules())
    masked, frozen = found
    assert (masked - frozen).abs().max() <= 1e-3 * masked.abs().max()


@pytest.mark.usefixtures('clean_up')
def test_training_goes_on_after_a_validation(make_runner):  # noqa: F811
    found = []
    for hooks in ([], [SparseInferenceHook()]):
        torch.manual_seed(0)
        runner = make_runner([BudgetHook(0.5), *hooks], model=ToyTask(),
            randomness=dict(seed=3), max_iters=4,
                             train_cfg=dict(by_epoch=False, max_iters=4, val_interval=2),
                             **evaluation('val'))  # fmt: skip
        runner.train()
        found.append(runner.model)
    with_masks, with_frozen = found
    assert find_gates(with_frozen)
    for one, two in zip(with_masks.parameters(), with_frozen.parameters(), strict=True):
        assert torch.equal(one, two)
