# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a budget closes first."""

import dataclasses

import pytest
import torch
from mmengine.hooks import Hook

from fgc_mm.gates import find_gates
from fgc_mm.training.budget.controller import BudgetController
from fgc_mm.training.budget.reading import Reading
from fgc_mm.training.budget.task_pull import TaskPull


class Share:
    """Two gates, the second twice as expensive."""

    def of(self, openness):
        return openness @ torch.tensor([0.2, 0.4])


def pulled(strengths, weight=0.0, logit=2.0, pull=None):
    """A batch whose task has these gradients, beside a loss on the share."""
    pull = pull or TaskPull()
    logits = [torch.full((3, 4), logit, requires_grad=True) for _ in range(2)]
    own = pull.watch(Share(), [[a] for a in logits], [False] * 2)
    task = sum((a * s).sum() for a, s in zip(logits, strengths, strict=True))
    (task + weight * sum(a.sigmoid().sum() for a in own)).backward()
    pull.take()
    return pull


def test_what_the_task_holds_moves_slowly():
    strengths = torch.tensor([[1.0, 2.0, -4.0, 0.0], [1.0, 2.0, -4.0, 0.0]])
    first, second = pulled(strengths).speeds()
    for speeds in (first, second):
        assert speeds[3] > speeds[0] > speeds[1] > speeds[2] > 0
        assert speeds[3] == pytest.approx(2, abs=1e-4)
    # What costs twice as much and is held twice as hard is as fast.
    assert second[1] == pytest.approx(float(first[0]))
    assert second[2] == pytest.approx(float(first[1]))
    assert float(torch.cat([first, second]).median()) == pytest.approx(1, abs=0.4)


def test_an_exponent_of_0_moves_all_alike():
    strengths = torch.tensor([[1.0, 2.0, -4.0, 0.0], [1.0, 2.0, -4.0, 0.0]])
    for speeds in pulled(strengths, pull=TaskPull(0.0)).speeds():
        assert torch.equal(speeds, torch.ones(4))


def test_the_budgets_own_gradients_do_not_count():
    strengths = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    alone, beside = pulled(strengths).speeds(), pulled(strengths, weight=50.0).speeds()
    for a, b in zip(alone, beside, strict=True):
        torch.testing.assert_close(a, b)


def test_speeds_are_means_over_batches():
    pull = TaskPull()
    assert pull.speeds() is None
    one, other = torch.ones(2, 4), torch.ones(2, 4)
    other[0, 0] = 3.0
    pulled(one, pull=pull)
    pulled(other, pull=pull)
    mean = torch.ones(2, 4)
    # Of squares, each batch over its own mean: 1 and 1, then 4.5 and 0.5.
    mean[0, 0] = (2.75 / 0.75) ** 0.5
    for a, b in zip(pull.speeds(), pulled(mean).speeds(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_batch_that_is_left_out_leaves_nothing():
    pull = pulled(torch.ones(2, 4))
    before = pull.state_dict()['means'].clone()
    pulled(torch.full((2, 4), float('inf')), pull=pull)
    logits = [torch.zeros(3, 4, requires_grad=True) for _ in range(2)]
    pull.watch(Share(), [[a] for a in logits], [False] * 2)
    sum(a.sum() for a in logits).backward()
    pull.discard()
    pull.take()
    assert torch.equal(pull.state_dict()['means'], before)


def test_gates_that_no_gradient_reaches():
    pull = TaskPull()
    logits = [torch.full((3, 4), 40.0), torch.full((3, 1), 40.0)]  # open for sure: no slope
    pull.watch(Share(), [[a] for a in logits], [False] * 2)
    pull.take()
    assert all(speeds.isfinite().all() for speeds in pull.speeds())


def test_the_scale_of_the_loss_does_not_count():
    """That of mixed precision changes in the middle of a training."""
    pull, plain = TaskPull(), TaskPull()
    rows = [torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]]) for _ in range(3)]
    for scale, strengths in zip((2.0**16, 2.0**16, 2.0**8), rows, strict=True):
        pulled(scale * strengths, pull=pull)
        pulled(strengths, pull=plain)
    for a, b in zip(pull.speeds(), plain.speeds(), strict=True):
        torch.testing.assert_close(a, b)


def test_gates_that_cannot_move_do_not_count():
    free = [torch.full((3, 4), 2.0, requires_grad=True) for _ in range(2)]
    pull = TaskPull()
    own = pull.watch(Share(), [[a] for a in free], [True, False])
    strengths = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sum((a * strengths).sum() for a in own).backward()
    sum((a * strengths).sum() for a in free).backward()
    pull.take()
    first, second = pull.speeds()
    assert torch.equal(first, torch.ones(4))
    assert second.median() == pytest.approx(1, abs=0.2)


def test_a_gate_that_did_not_run_keeps_what_is_known():
    pull = pulled(torch.ones(2, 4))
    before = pull.state_dict()['means'].clone()
    logits = [torch.full((3, 4), 2.0, requires_grad=True), torch.zeros(3, 4)]
    pull.watch(Share(), [[a] for a in logits], [False] * 2)
    (3 * logits[0]).sum().backward()
    pull.take()
    after = pull.state_dict()['means']
    assert torch.equal(after[:, 4:], before[:, 4:]) and after[2].tolist() == [2.0] * 4 + [1.0] * 4


def test_a_state_is_no_view():
    pull = pulled(torch.ones(2, 4))
    state = pull.state_dict()
    kept = state['means'].clone()
    pulled(torch.rand(2, 4), pull=pull)
    assert torch.equal(state['means'], kept)


def test_no_step_is_longer_than_allowed():
    controller = BudgetController(target=0.5, steps=100)
    near = torch.zeros(3)
    reading = Reading(1.0, 1.0, -2.0, 0.2, 0.0, [1.0], room=[4.0], lowest=near, highest=near)
    speeds = [torch.tensor([0.1, 1.0, 2.0])]
    (move,) = controller.update(reading, 0, speeds)
    assert move.tolist() == pytest.approx([-0.04, -0.2, -0.2])
    # At its floor a gate comes up, however slow its channels are.
    (move,) = controller.update(dataclasses.replace(reading, room=[-0.5]), 1, speeds)
    assert move.tolist() == pytest.approx([0.1] * 3)


@pytest.mark.parametrize('scale', [1.0, 2.0**16])
def test_the_balance_is_the_weight_that_holds_the_task(scale):
    """On these logits a share's gradient is known; the scale is that of mixed precision."""
    pull = TaskPull()
    for held in (3.0, 5.0):
        logits = [torch.full((3, 4), 2.0, requires_grad=True) for _ in range(2)]
        own = pull.watch(Share(), [[a] for a in logits], [False] * 2)
        openness = torch.stack([a.sigmoid().mean(dim=1) for a in own], dim=1)
        task = held * Share().of(torch.stack([a.sigmoid().mean(dim=1) for a in logits], dim=1))
        loss = pull.beside(Share().of(openness).mean()) - task.mean()
        (scale * loss).backward()
        pull.take()
    assert pull.balance() == pytest.approx(4.0, rel=1e-4)
    other = TaskPull()
    other.load_state_dict(pull.state_dict(), torch.device('cpu'))
    assert other.balance() == pull.balance()


def test_a_task_that_pulls_down_needs_no_weight():
    assert pulled(torch.ones(2, 4)).balance() == 0


class Useless(Hook):
    """Makes every other gated channel of no use, by the weights behind it."""

    def before_train(self, runner):
        for name, module in runner.model.named_modules():
            if name.startswith('backbone.layer') and name.endswith('conv2'):
                with torch.no_grad():
                    module.weight[:, ::2] = 0


def trained(make_runner, toy, target, **gate):
    """Openness of what is of no use and of what is, at a rate at which the optimizer does
    nothing about it."""
    gate = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'), **gate)
    model = toy.task(dict(toy.backbone, gate=gate))
    runner = make_runner(
        [dict(type='BudgetHook', target=target, check_interval=5), Useless()],
        model=model,
        max_iters=60,
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=1e-6)),
        randomness=dict(seed=0),
    )
    runner.train()
    model.eval()
    model(toy.images(12).images)
    masks = [gate.record.mask for gate in find_gates(model).values()]
    of_no_use = torch.cat([mask[:, ::2].flatten() for mask in masks]).mean()
    of_use = torch.cat([mask[:, 1::2].flatten() for mask in masks]).mean()
    return float(of_no_use), float(of_use)


def test_what_is_of_no_use_closes(make_runner, toy):
    of_no_use, of_use = trained(make_runner, toy, 0.6)
    assert of_no_use < 0.1 and of_use > 0.4


def test_what_is_of_no_use_is_not_opened_first(make_runner, toy):
    of_no_use, of_use = trained(make_runner, toy, 0.75, bias_init=-1.5)
    assert of_use > 0.3 and of_no_use < of_use + 0.3
