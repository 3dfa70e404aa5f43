# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The controller alone, on a network of one formula."""

import math
import random

import pytest
import torch

from fgc_mm.training import BudgetController
from fgc_mm.training.budget.reading import Reading


def reading(shift=0.0, hard=0.5, over_cap=0.0, lowest=(-1.0,), highest=(1.0,)):
    sure = dict(doubt=0.2, over_cap=over_cap, openness=[hard], room=[4.0])
    logits = dict(lowest=torch.tensor(lowest), highest=torch.tensor(highest))
    return Reading(hard, hard, shift, **sure, **logits)


def share_at(logit):
    return 0.1 + 0.9 / (1 + math.exp(-2 * logit))


def logit_at(share):
    open_ = min(0.9999, max(0.0001, (share - 0.1) / 0.9))
    return math.log(open_ / (1 - open_)) / 2


def train(steps, rate, noise, momentum=0.9, target=0.4, balance=1.0, switch=1.0, seed=0):
    """The share over a training whose optimizer presses with the weight in the loss.

    The task holds against it with the force of a weight of ``balance``; with a high
    ``switch`` only the sign of the difference counts. ``rate`` is how far an
    optimizer of unit steps, such as Adam, moves a logit; ``noise`` what a batch
    differs from the next, in logits.
    """
    controller = BudgetController(target=target, steps=steps)
    chance = random.Random(seed)
    logit, speed, shares = 2.0, 0.0, []
    for step in range(steps):
        goal = controller.goal(step)
        goal = share_at(logit) if goal is None else goal
        away = logit_at(goal) - logit + chance.gauss(0, noise)
        found = reading(min(2.0, max(-2.0, away)), share_at(logit))
        # Rates fall with half a cosine.
        decayed = rate * (1 + math.cos(math.pi * step / steps)) / 2
        force = math.tanh(switch * (balance - controller.state.weight))
        speed = momentum * speed + (1 - momentum) * decayed * force
        (shift,) = controller.update(found, step)
        logit += speed + shift
        shares.append(share_at(logit))
    return shares


@pytest.mark.parametrize('steps', [100, 1000, 5000])
@pytest.mark.parametrize('rate', [0.0, 0.01, 0.03, 0.1])
@pytest.mark.parametrize('optimizer', [dict(), dict(balance=0.2, switch=10.0)])
def test_on_target_without_oscillation(steps, rate, optimizer):
    shares = train(steps, rate, noise=0.0, **optimizer)
    assert shares[-1] == pytest.approx(0.4, abs=0.015)
    # It comes down to the target, never to rise by much again, and stays.
    lowest = 1.0
    for share in shares:
        lowest = min(lowest, share)
        assert share < lowest + 0.05
    assert lowest > 0.37
    late = shares[int(0.7 * steps) :]
    assert max(late) - min(late) < 0.03


@pytest.mark.parametrize('rate', [0.0, 0.03])
@pytest.mark.parametrize('seed', range(4))
def test_noise_of_the_batches_averages_out(rate, seed):
    """Noise of 0.3 logits is 12 points of the share here; nothing of it may be kept."""
    shares = train(2000, rate, noise=0.3, seed=seed)
    assert shares[-1] == pytest.approx(0.4, abs=0.02)
    assert max(abs(share - 0.4) for share in shares[1900:]) < 0.03


@pytest.mark.parametrize('rate', [0.003, 0.01])
def test_a_drift_that_no_weight_meets_is_met(rate):
    """The task opens gates harder than the largest weight in the loss closes them."""
    shares = train(2000, rate, noise=0.0, balance=10.0)
    assert shares[-1] == pytest.approx(0.4, abs=0.02)


def test_nothing_winds_up():
    """However long the gates refuse to move, the way back is short."""
    controller = BudgetController(target=0.5, steps=1000)
    for step in range(5000):
        (shift,) = controller.update(reading(shift=-2.0, hard=1.0), min(step, 999))
        assert -controller.max_shift <= shift < 0
    assert controller.state.weight == controller.max_weight
    # Pushed up: at once, also while the gain is low.
    (shift,) = controller.update(reading(shift=2.0), 999)
    assert shift >= 0
    # The weight is gone after as many logits as it came with.
    steps = 0
    while controller.state.weight and steps < 1000:
        controller.update(reading(shift=2.0), 600)
        steps += 1
    assert steps < 1.2 * controller.max_weight / (0.25 * controller.max_shift)


@pytest.mark.parametrize('whole', [True, False])
def test_a_channel_that_no_image_brings_near_stays(whole):
    """For each of two gates, of one channel and of three; nothing is held on the way back."""
    found = reading(lowest=(-9.0, -20.0, -1.0, 9.0), highest=(-1.0, -9.0, 1.0, 20.0))
    for amount, expected in ((-0.1, [-0.1, 0, -0.1, -0.1]), (0.1, [0.1, 0.1, 0.1, 0])):
        moves = [amount, amount] if whole else [torch.full((n,), amount) for n in (1, 3)]
        moved = torch.cat(found.harmless(moves, [1, 3]))
        assert moved.tolist() == pytest.approx(expected)


def test_validations_correct_what_batches_say():
    controller = BudgetController(target=0.5, steps=100)
    for step in range(61):
        controller.update(reading(hard=0.5), step)
    controller.validated(0.9, step=30)  # on the way
    assert controller.state.share == pytest.approx(0.5)
    controller.correct(-0.02)
    controller.validated(0.53, step=60)
    assert controller.state.share == pytest.approx(0.53)
    controller.validated(0.51, step=80)
    assert controller.state.share == pytest.approx(0.52)
    for step in (85, 90, 95):
        controller.validated(0.95, step)  # averaged weights that are still open
    assert controller.state.gap == 0.05


def test_the_cap_presses_while_images_are_above():
    controller = BudgetController(target=0.5, steps=100)
    for step in range(20):
        controller.update(reading(over_cap=0.1), step)
    pressed = controller.state.cap_weight
    assert pressed > 0
    for step in range(20, 40):
        controller.update(reading(), step)
    assert 0 < controller.state.cap_weight < pressed


def test_a_network_below_the_target_comes_up():
    controller = BudgetController(target=0.8, steps=100)
    controller.update(reading(hard=0.3), 0)
    assert controller.goal(30) == pytest.approx(0.55)
    assert controller.goal(60) == controller.goal(99) == pytest.approx(0.8)
