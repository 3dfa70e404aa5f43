# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from types import SimpleNamespace

import pytest
from mmengine.hooks import Hook

from fgc_mm.training import BudgetHook, build_schedule

EPOCHS = dict(by_epoch=True, max_epochs=10)


def test_a_number_is_constant():
    schedule = build_schedule(0.4, 'rho')
    assert [schedule.at(epoch) for epoch in (0, 0.5, 1000)] == [0.4] * 3
    assert build_schedule(1, 'rho').at(0) == 1.0


def test_ramp_up_by_hand():
    schedule = build_schedule(dict(start=10, end=210, value=0.4), 'rho')
    values = [schedule.at(epoch) for epoch in (0, 10, 60, 110, 210, 400)]
    assert values == pytest.approx([0, 0, 0.1, 0.2, 0.4, 0.4])


def test_ramp_down_by_hand():
    schedule = build_schedule(dict(start=0, end=100, begin=0.75, value=0), 'zeta')
    assert [schedule.at(epoch) for epoch in (0, 20, 99, 100, 130)] == pytest.approx(
        [0.75, 0.6, 0.0075, 0, 0]
    )


def test_a_step():
    schedule = build_schedule(dict(start=3, end=3, value=2), 'rho')
    assert [schedule.at(epoch) for epoch in (0, 2.99, 3, 4)] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    'cfg, message',
    [
        (dict(start=0, stop=3, value=1), "rho=.* no key 'stop'.*dict\\(start=..., end=..., value"),
        (dict(start=0, end=3), "rho=.*lacks the key 'value'"),
        (dict(start=5, end=3, value=1), 'rho: start=5 and end=3 .* 0 <= start <= end'),
        (dict(start=-1, end=3, value=1), 'rho: start=-1'),
        (dict(start=0, end='3', value=1), "rho.end='3' must be a finite number"),
        (dict(start=0, end=3, value=-1), 'rho.value=-1 must be 0 or more'),
        (-0.5, 'rho=-0.5 must be 0 or more'),
        ('0.4', "rho='0.4' must be a finite number"),
        (True, 'rho=True'),
        (None, 'rho=None'),
        (float('nan'), 'rho=nan'),
        ([0.4], r'rho=\[0.4\]'),
        (dict(start='budged', end=2, value=1), "rho.start='budged' must be a finite number"),
        (dict(start='budget', end=2, value=1), "start='budget' the value rises within one epoch"),
        (dict(start=-1, end='budget', value=1), 'rho: start=-1'),
    ],
)
def test_wrong_configs_are_named(cfg, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(cfg, 'rho')


@pytest.mark.parametrize(
    ('cfg', 'start', 'end'),
    [
        (dict(start='budget', value=1), 3, 4),
        (dict(start=1, end='budget', begin=2, value=0), 1, 3),
        (dict(start=5, end='budget', begin=2, value=0), 3, 3),
        (dict(start=1, end=2, value=1), 1, 2),
        (0.4, 0, 0),
    ],
)
@pytest.mark.parametrize('loop', [dict(max_iters=30), dict(train_cfg=EPOCHS)])
def test_waiting_for_the_budget(cfg, start, end, loop, make_runner):
    """10 epochs of 3 iterations; the budget is met after 30 % of them."""
    settled = []

    class Asks(Hook):
        def before_train(self, runner):
            settled.append(build_schedule(cfg, 'rho').settled(runner, 'rho'))
            settled.append(settled[0].settled(runner, 'rho'))

    make_runner([dict(type='BudgetHook', target=0.5, reach=0.3), Asks()], **loop).train()
    assert (settled[0].start, settled[0].end) == pytest.approx((start, end))
    assert settled[0] == settled[1]


def test_without_a_budget_there_is_nothing_to_wait_for():
    schedule = build_schedule(dict(start='budget', value=1), 'FGCHook: eta')
    with pytest.raises(ValueError, match="FGCHook: eta: 'budget' waits for a BudgetHook"):
        schedule.settled(SimpleNamespace(hooks=[]), 'FGCHook: eta')
    with pytest.raises(ValueError, match='call settled'):
        schedule.at(1)
    assert BudgetHook(target=0.5, reach=0.3).reached_at(SimpleNamespace(max_iters=200)) == 60
