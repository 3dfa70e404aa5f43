# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A budget in a loop without a Runner."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fgc_mm.gates import find_gates
from fgc_mm.training import Budget

LABELS = torch.arange(4)


def batches(images, steps):
    return [images[4 * (i % 3) :][:4] for i in range(steps)]


def train(model, images, budget, start, stop, optimizer=None, between=None):
    """The steps from one number to another, each with noise of its own."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for step, batch in enumerate(batches(images, stop)):
        if step < start:
            continue
        torch.manual_seed(5 + step)
        loss = F.cross_entropy(model(batch), LABELS) + budget.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        budget.step()
        if between is not None:
            between()


def everything(model, budget):
    pull = budget.state_dict()['pull']
    tensors = {**model.state_dict(), 'means': pull.pop('means')}
    numbers = {**budget.state_dict(), 'pull': pull}
    return {name: value.clone() for name, value in tensors.items()}, numbers


def assert_same(one, other):
    assert one[1] == other[1]
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name


def test_it_is_what_the_hook_does(make_runner, toy):
    probe = toy.probe(seed=5)
    hook = dict(type='BudgetHook', target=0.5, check_interval=2, cap=0.6, floor=0.1)
    runner = make_runner([hook, probe], train_cfg=dict(by_epoch=True, max_epochs=2))
    runner.train()
    theirs = next(h for h in runner.hooks if hasattr(h, 'budget')).budget

    model = probe.start
    options = dict(check_interval=2, cap=0.6, floor=0.1, backbone='backbone')
    budget = Budget(model, 0.5, steps=6, **options)
    train(model, toy.images().images, budget, 0, 6)
    assert_same(everything(model, budget), everything(runner.model, theirs))
    assert budget.share == theirs.share and budget.goal == theirs.goal


def test_it_goes_on_where_it_was(toy):
    images = toy.images().images
    model = toy.task()
    budget = Budget(model, save=0.5, steps=6, check_interval=2)
    train(model, images, budget, 0, 3)
    kept = copy.deepcopy((model.state_dict(), budget.state_dict()))
    train(model, images, budget, 3, 6)

    other = toy.task()
    resumed = Budget(other, save=0.5, steps=6, check_interval=2)
    other.load_state_dict(kept[0])
    resumed.load_state_dict(kept[1])
    assert resumed.iteration == 3
    train(other, images, resumed, 3, 6)
    assert_same(everything(model, budget), everything(other, resumed))


def test_evaluation_leaves_everything_as_it_is(toy):
    images = toy.images().images
    ends = []
    for looks in (False, True):
        torch.manual_seed(0)
        model = toy.task()
        budget = Budget(model, 0.5, steps=6, check_interval=2)

        def look(model=model, budget=budget):
            before = everything(model, budget)
            model.eval()
            with torch.no_grad():
                model(torch.rand(3, 3, 64, 64))
                assert budget.loss().isfinite()
                assert not budget.step()
            assert_same(everything(model, budget), before)
            model.train()

        train(model, images, budget, 0, 6, between=look if looks else None)
        ends.append(everything(model, budget))
    assert_same(*ends)


def test_a_step_that_is_not_taken_leaves_nothing(toy):
    model, images = toy.task(), toy.images().images
    budget = Budget(model, 0.5, steps=6, check_interval=1)
    train(model, images, budget, 0, 1)
    before = everything(model, budget)
    model(images[:4])
    budget.loss().backward()
    budget.discard()
    assert not budget.step() and budget.iteration == 1
    assert everything(model, budget)[1] == before[1]


def test_half_precision(toy):
    model, images = toy.task(), toy.images().images
    budget = Budget(model, 0.5, steps=4, check_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for batch in batches(images, 4):
        with torch.autocast('cpu', torch.bfloat16):
            loss = F.cross_entropy(model(batch), LABELS) + budget.loss()
        assert loss.dtype == torch.float32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        budget.step()
    assert budget.controller.state.seen == 4 and budget.controller.state.checks == 2


def test_closed_it_is_no_longer_there(toy):
    model = toy.task()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    Budget(model, 0.5, steps=6).close()
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_mistakes(toy):
    model = toy.task()
    for options, message in (
        (dict(steps=0), 'steps=0 must be the number of steps'),
        (dict(steps=6, target=50), r'^target=50 must be within \(0, 1\]'),
        (dict(steps=6, backbone='body'), "^backbone='body' is no part of ToyTask"),
        (dict(steps=6, flor=0.1), "Budget has no argument 'flor'; did you mean 'floor'"),
    ):
        with pytest.raises(ValueError, match=message):
            Budget(model, **{'target': 0.5, **options})
    budget = Budget(model.train(), 0.01, steps=6)
    with pytest.raises(RuntimeError, match='none of the 8 gates ran in this forward pass'):
        budget.loss()
    model(toy.images().images[:4])
    with pytest.raises(ValueError, match=r'^target=0\.01 cannot be reached'):
        budget.loss()
    with pytest.raises(ValueError, match='has no gates: its cost cannot be controlled'):
        Budget(torch.nn.Linear(2, 2), 0.5, steps=6)
    for gate in find_gates(model).values():
        gate.requires_grad_(False)
    with pytest.raises(ValueError, match='all gates are frozen'):
        Budget(model, 0.5, steps=6)
