# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A budget, by training with it."""

import logging

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from fgc_mm.errors import UsageError
from fgc_mm.gates import find_gates
from fgc_mm.macs import count_macs
from fgc_mm.training import BudgetHook
from fgc_mm.training.budget.budget import Budget

OPTIMIZERS = {
    'sgd': dict(type='SGD', lr=0.05, momentum=0.9),
    # A rate at which a fixed rho moves nothing.
    'slow': dict(type='SGD', lr=1e-5),
    'adam': dict(type='AdamW', lr=1e-3),
}


def shares(model, images):
    """The share of each image as evaluation counts it."""
    model.eval()
    counted = count_macs(model, images, backbone='backbone')
    return [i.backbone_executed / i.backbone_dense for i in counted]


def executed(model, images):
    """That of all images, which have one size."""
    found = shares(model, images)
    return sum(found) / len(found)


def budget_hook(runner):
    return next(hook for hook in runner.hooks if isinstance(hook, BudgetHook))


@pytest.mark.parametrize(
    ('optimizer', 'budget'),
    [('sgd', dict(target=0.5)), ('slow', dict(save=0.5)), ('adam', dict(target=0.45))],
)
def test_training_ends_at_the_target(optimizer, budget, make_runner, toy):
    # Layer norm: the statistics of 4 pictures are not those of evaluation.
    gate = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'))
    model = toy.task(dict(toy.backbone, gate=gate))
    hook = dict(type='BudgetHook', check_interval=5, **budget)
    optim = dict(optimizer=OPTIMIZERS[optimizer])
    # Some seeds end 2.5 points off, with these 12 pictures.
    seed = dict(randomness=dict(seed=0))
    runner = make_runner([hook], model=model, max_iters=120, optim_wrapper=optim, **seed)
    runner.train()
    images = toy.images(12).images
    assert executed(model, images) == pytest.approx(budget.get('target', 0.5), abs=0.02)
    logged = runner.message_hub.log_scalars
    goals = logged['train/budget/goal'].data[0]
    assert goals[0] > 0.8 and (goals[1:] <= goals[:-1] + 1e-9).all()
    # Reached well before the end.
    assert goals[73] == pytest.approx(budget.get('target', 0.5))


def test_a_strong_loss_is_held(make_runner, toy):
    """A distillation's is many times that of a task; the optimizer moves gates by its size."""
    gate = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'))
    model = toy.task(dict(toy.backbone, gate=gate), task_weight=1000.0)
    optim = dict(optimizer=dict(OPTIMIZERS['sgd'], lr=0.02), clip_grad=dict(max_norm=5))
    hook = dict(type='BudgetHook', target=0.4, check_interval=5)
    runner = make_runner(
        [hook], model=model, max_iters=120, optim_wrapper=optim, randomness=dict(seed=0)
    )
    runner.train()
    assert executed(model, toy.images(12).images) == pytest.approx(0.4, abs=0.02)
    # Where the task holds on to its channels with more than the bound, weights grow with it.
    budget = budget_hook(runner).budget
    state = budget.state_dict()
    for balance, times in ((1.0, 1.0), (40.0, 15.0)):
        pull = {**state['pull'], 'balance': balance}
        budget.load_state_dict({**state, 'weight': 2.0, 'pull': pull})
        assert budget.weight == pytest.approx(2.0 * times)


def test_a_low_bias_is_no_closed_gate(make_runner, toy):
    """What the bias behind takes the norm before it gives: such gates are open, and close."""
    gate = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'), bias_init=-38.0)
    model = toy.task(dict(toy.backbone, gate=gate))
    optim = dict(optimizer=OPTIMIZERS['slow'])
    hooks = [dict(type='BudgetHook', target=0.5, check_interval=5), Lifted()]
    runner = make_runner(hooks, model=model, max_iters=120, optim_wrapper=optim)
    runner.train()
    assert runner.message_hub.log_scalars['train/budget/goal'].data[0][0] > 0.8
    assert executed(model, toy.images(12).images) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ('eta', 'said'),
    [
        (0.03, 1),
        (dict(start=0, end=3, value=0.03), 1),
        (dict(start=2, end=3, value=0.03), 0),
        (dict(start='budget', value=0.03), 0),
    ],
)
def test_coupling_before_the_target_is_mentioned(eta, said, digits_cfg, build, monkeypatch):
    hooks = [dict(type='BudgetHook', target=0.5), dict(type='FGCHook', k=2, eta=eta)]
    runner = build(digits_cfg(hooks, max_epochs=1))
    lines = []
    monkeypatch.setattr(runner.logger, 'info', lines.append)
    runner.train()
    assert len([line for line in lines if 'couples from the start on' in line]) == said


class Lifted(Hook):
    """The hidden layer of each gate adds 40 to all logits."""

    @torch.no_grad()
    def before_train(self, runner):
        for gate in find_gates(runner.model).values():
            gate.norm.bias.fill_(100.0)
            gate.fc2.weight.add_((0.4 - gate.fc2.weight.sum(dim=1, keepdim=True)) / 16)


def test_averaged_weights_are_not_chased(digits_cfg, build):
    """An average over as many steps as lie between two validations is open for long."""
    hooks = [
        dict(type='BudgetHook', target=0.5, reach=0.3),
        dict(type='GatedMACsHook'),
        dict(type='EMAHook', momentum=0.02),
    ]
    cfg = digits_cfg(hooks, max_epochs=40, **{'train_cfg.val_interval': 6})
    cfg.val_dataloader = dict(cfg.train_dataloader, sampler=dict(type='DefaultSampler'))
    cfg.merge_from_dict(dict(val_cfg=dict(), val_evaluator=dict(type='Accuracy')))
    cfg.default_hooks.checkpoint = None
    runner = build(cfg)
    runner.train()
    assert budget_hook(runner).budget.controller.state.hard > 0.4


@pytest.mark.parametrize(('backbone', 'taken'), [('backbone', True), ('', False)])
def test_the_share_of_another_part_is_not_taken_over(backbone, taken, make_runner):
    hooks = [dict(type='BudgetHook', target=0.5), dict(type='GatedMACsHook', backbone=backbone)]
    runner = make_runner(hooks, max_iters=3)
    runner.train()
    budget_hook(runner).after_val_epoch(runner, {'macs/pruning_ratio': 20.0})
    assert budget_hook(runner)._validated == ((3, 0.8) if taken else None)


def test_a_missed_target_is_a_warning(make_runner, monkeypatch):
    runner = make_runner([dict(type='BudgetHook', target=0.5)], max_iters=3)
    said = []
    monkeypatch.setattr(runner.logger, 'log', lambda level, text: said.append((level, text)))
    runner.train()
    assert [level for level, text in said if 'the network executes' in text] == [logging.WARNING]
    assert 'tools/test.py --budget 0.5' in said[-1][1]


def test_the_share_is_that_of_evaluation(make_runner, toy, monkeypatch):
    model = toy.task()
    runner = make_runner([dict(type='BudgetHook', target=0.5, check_interval=1)], model=model, n=4)
    seen, evaluate = [], Budget._evaluate

    def compared(self, args, kwargs):
        before = {name: m.training for name, m in model.named_modules()}
        records = [gate.record for gate in find_gates(model).values()]
        found = evaluate(self, args, kwargs)
        assert before == {name: m.training for name, m in model.named_modules()}
        for gate, record in zip(find_gates(model).values(), records, strict=True):
            assert gate.record is record
        seen.append((found, executed(model, args[0])))
        model.train()
        return found

    monkeypatch.setattr(Budget, '_evaluate', compared)
    runner.train()
    assert len(seen) == 1
    assert seen[0][0] == pytest.approx(seen[0][1])


def test_no_layer_falls_below_its_floor(make_runner, toy):
    lowest = {}
    for floor in (0.0, 0.25):
        torch.manual_seed(0)
        model = toy.task()
        # One layer that would close at once.
        with torch.no_grad():
            first = next(iter(find_gates(model).values()))
            first.bias_init = -1.0
        hook = dict(type='BudgetHook', target=0.6, floor=floor)
        runner = make_runner([hook], model=model, max_iters=60)
        runner.train()
        lowest[floor] = min(budget_hook(runner).budget.controller.state.openness)
    assert lowest[0.0] < 0.1
    assert lowest[0.25] > 0.2


def test_no_image_stays_above_the_cap(make_runner, toy):
    """Bright pictures open more; a cap brings them down, and the mean stays about the target."""
    data = toy.images(24)
    data.images = data.images.abs() * torch.linspace(0.2, 2, 24).view(-1, 1, 1, 1)
    loader = dict(dataset=data, sampler=dict(type='InfiniteSampler', shuffle=False), batch_size=24)
    # A norm would hide how bright a picture is.
    gate = dict(type='BinConcreteGate', norm_cfg=None)
    found = {}
    for cap in (None, 0.55):
        torch.manual_seed(4)  # of gates that follow brightness
        model = toy.task(dict(toy.backbone, norm_eval=True, gate=gate))
        for module in find_gates(model).values():
            torch.nn.init.uniform_(module.fc1.weight, 0, 0.2)
            torch.nn.init.uniform_(module.fc2.weight, 0, 0.2)
        model.init_weights = lambda: None
        runner = make_runner(
            [dict(type='BudgetHook', target=0.5, cap=cap, check_interval=5)],
            model=model,
            max_iters=150,
            train_dataloader=loader,
            # Without the statistics of batches a higher rate gets to NaN.
            optim_wrapper=dict(optimizer=dict(OPTIMIZERS['sgd'], lr=0.01)),
            randomness=dict(seed=0),
        )
        runner.train()
        found[cap] = shares(model, data.images)
        # Eight channels a gate, which bright pictures open together: coarse steps.
        assert 0.4 < sum(found[cap]) / len(found[cap]) < 0.56
    assert max(found[None]) > 0.6
    assert max(found[0.55]) <= 0.55


def test_a_resumed_run_is_the_uninterrupted_one(make_runner, toy, tmp_path):
    hook = dict(type='BudgetHook', target=0.5, check_interval=2)
    common = dict(
        train_cfg=dict(by_epoch=True, max_epochs=4),
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=1),
            checkpoint=dict(type='CheckpointHook', interval=2),
        ),
    )
    torch.manual_seed(1)
    straight = make_runner([hook, toy.probe(seed=5)], **common)
    straight.train()
    resumed = make_runner(
        [hook, toy.probe(seed=5)], load_from=str(tmp_path / 'epoch_2.pth'), resume=True, **common
    )
    resumed.train()
    states = [budget_hook(r).budget.controller.state_dict() for r in (straight, resumed)]
    assert states[0] == states[1]
    assert states[0]['seen'] == 12 and states[0]['checks'] == 6
    pulls = [budget_hook(r).budget.pull.state_dict()['means'] for r in (straight, resumed)]
    assert torch.equal(*pulls) and pulls[0][2].min() == 12
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_target_is_looked_at_again_on_resuming(make_runner, tmp_path):
    common = dict(
        train_cfg=dict(by_epoch=True, max_epochs=2),
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=1),
            checkpoint=dict(type='CheckpointHook', interval=1),
        ),
    )
    make_runner([dict(type='BudgetHook', target=0.5)], **common).train()
    other = [dict(type='BudgetHook', target=0.01)]
    start = dict(load_from=str(tmp_path / 'epoch_1.pth'), resume=True)
    with pytest.raises(UsageError, match=r'target=0\.01 cannot be reached'):
        make_runner(other, **start, **common).train()


def test_a_state_is_for_resuming_only(make_runner, tmp_path):
    """``load_from`` starts a training of its own."""
    torch.save(dict(state_dict={}, budget=dict(start=0.1, seen=7)), tmp_path / 'other.pth')
    runner = make_runner(
        [dict(type='BudgetHook', target=0.5)], load_from=str(tmp_path / 'other.pth')
    )
    runner.train()
    state = budget_hook(runner).budget.controller.state
    assert state.seen == 3 and state.start > 0.5


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(target=0), r'target=0 must be within \(0, 1\]'),
        (dict(target=1.2), r'target=1.2 must be within \(0, 1\]'),
        (dict(save=1.0), r'save=1.0 must be within \[0, 1\)'),
        (dict(), 'give one of them'),
        (dict(target=0.5, save=0.5), 'give one of them'),
        (dict(target=0.5, begin=0.7), 'begin=0.7 and reach=0.6 must be parts of the training'),
        (dict(target=0.5, floor=1), r'floor=1 must be within \[0, 1\)'),
        (dict(target=0.5, cap=0.4), r'cap=0.4 must be within \[0.5, 1\]'),
        (dict(target=0.5, check_interval=0), 'check_interval=0 must be'),
        (dict(target=0.5, max_weight=0), 'max_weight=0 must be positive'),
        (dict(target=0.5, pull=2), r'pull=2 must be within \[0, 1\]'),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match='BudgetHook: .*' + message):
        HOOKS.build(dict(type='BudgetHook', **options))


def test_mistakes_show_before_the_first_step(make_runner, toy):
    half = dict(type='BudgetHook', target=0.5)

    def refused(message, *hooks, model=None):
        runner = make_runner(hooks, model=model)
        start = [p.clone() for p in runner.model.parameters()]
        runner.model.init_weights = lambda: None
        with pytest.raises(UsageError, match=message):
            runner.train()
        assert runner.iter == 0
        for before, after in zip(start, runner.model.parameters(), strict=True):
            assert torch.equal(before, after)

    refused('an L0Hook as well', half, dict(type='L0Hook'))
    refused('two of them', half, dict(type='BudgetHook', save=0.2))
    refused(r'BudgetHook: the model ToyTask .* has no gates', half,
            model=toy.task(dict(toy.backbone, gate=None)))  # fmt: skip
    refused('cost of FBSGate backbone.gates.layer1-0-conv1 is not learned', half,
            model=toy.task(dict(toy.backbone, gate=dict(type='FBSGate'))))  # fmt: skip
    refused("backbone='body' is no part of ToyTask", dict(half, backbone='body'))
    refused("backbone='head' of ToyTask has no gates", dict(half, backbone='head'))
    model = toy.task()
    for gate in find_gates(model).values():
        gate.requires_grad_(False)
    refused('all gates are frozen', half, model=model)
    model = toy.task()
    for gate in list(find_gates(model).values())[1:]:
        gate.requires_grad_(False)
    refused('target=0.5 cannot be reached: .* frozen gates as they are, cost 0', half, model=model)
    model = toy.task()
    refused(r'target=0.01 cannot be reached: stem.* cost (0\.\d+) .*above \1',
            dict(half, target=0.01), model=model)  # fmt: skip
    refused(r'target=0.3 cannot be reached: .* floor of 0.9, cost 0\.9',
            dict(half, target=0.3, floor=0.9))  # fmt: skip
