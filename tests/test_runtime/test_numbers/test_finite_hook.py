# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""NaN and Inf in real trainings: where they are named, and what they do not get into."""

import copy
import math
import os
import warnings

import pytest
import torch
import torch.nn as nn
from mmengine.hooks import CheckpointHook, Hook
from mmengine.optim import OptimWrapper

from fgc_mm.errors import NonFiniteError
from fgc_mm.gates import find_gates
from fgc_mm.runtime import FiniteHook
from fgc_mm.training import BudgetHook, FGCHook

FGC = dict(type='FGCHook', layers=[-2, -1], k=3, eta=0.1, num_instances=12)
EVERYTHING = [FGC, dict(type='BudgetHook', target=0.5), dict(type='BatchShapingHook', history=2)]
SAVE = dict(checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=False, max_keep_ckpts=1))


class Spoil(Hook):
    """Does something at one iteration, counted from 1, and copies all there is around it."""

    priority = 'VERY_LOW'

    def __init__(self, do, at=(2,)):
        self.do, self.at, self.states = do, at, {}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter + 1 in self.at:
            self.states['before'] = state_of(runner)
            self.do(runner, data_batch)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 in self.at:
            self.states['after'] = state_of(runner)
            self.outputs = outputs


def state_of(runner):
    """Weights, statistics, optimizer, banks and controller, by name."""
    state = {f'model.{k}': v.clone() for k, v in runner.model.state_dict().items()}
    optimizer = runner.optim_wrapper.optimizer
    for number, values in enumerate(optimizer.state.values()):
        for key, value in values.items():
            state[f'optimizer.{number}.{key}'] = torch.as_tensor(value).clone()
    for hook in runner.hooks:
        if isinstance(hook, FGCHook):
            state['seen'] = torch.tensor(hook.coupling.seen)
            for name, coupling in hook.coupling.layers.items():
                state[f'{name}.feature'] = coupling.feature_bank.data.clone()
                state[f'{name}.gate'] = coupling.gate_bank.data.clone()
        if isinstance(hook, BudgetHook):
            state['budget'] = torch.tensor(
                repr(hook.budget.controller.state_dict()).encode().__hash__()
            )
    return state


def assert_equal(first, second):
    assert first.keys() == second.keys()
    assert not [key for key in first if not torch.equal(first[key], second[key])]


def nan_picture(runner, data_batch):
    # A copy: the dataset hands out its own tensors.
    data_batch['inputs'] = [x.clone() for x in data_batch['inputs']]
    data_batch['inputs'][1][0, 0, 0] = math.nan


def nan_after(name):
    """Spoil the output of a layer, once."""

    def do(runner, data_batch):
        def hook(module, args, out):
            handle.remove()
            bad = out.clone()
            bad[-1] = math.inf
            return bad

        handle = runner.model.get_submodule(name).register_forward_hook(hook)

    return do


class Poison(nn.Module):
    """Makes Inf whenever it is on; the pass that looks for it sees it too."""

    on = False

    def forward(self, x):
        return x / 0 if self.on else x


def nan_gradient(runner, data_batch):
    weight = runner.model.head.weight

    def hook(gradient):
        handle.remove()
        return gradient * math.nan

    handle = weight.register_hook(hook)


def nan_weight(runner, data_batch):
    with torch.no_grad():
        runner.model.backbone.layer1[0].conv1.weight[0] = math.nan


def huge_step(runner, data_batch):
    """A finite gradient that leaves weights that are not."""
    runner.optim_wrapper.optimizer.param_groups[0]['lr'] = 1e38
    runner.model.head.weight.register_hook(lambda gradient: gradient * 0 + 1e38)


def numbered(images):
    """The same pictures, with the numbers FGCHook asks for."""
    items = [images[index] for index in range(len(images))]
    for index, item in enumerate(items):
        item['data_samples'].set_metainfo(dict(instance_idx=index))
    return items


@pytest.fixture
def train(make_runner, toy):
    """``train(do, action, hooks=..., **arguments)``: the runner and the hook that spoils."""

    def run(do, action='skip', hooks=EVERYTHING, at=(2,), error=None, max_iters=4, **kwargs):
        spoil = Spoil(do, at)
        finite = [] if action is None else [FiniteHook(action)]
        kwargs.setdefault('optim_wrapper', dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9)))
        loader = dict(
            dataset=numbered(toy.images()),
            sampler=dict(type='InfiniteSampler', shuffle=False),
            batch_size=4,
            num_workers=0,
        )
        hooks = [*copy.deepcopy(hooks), *finite, spoil]
        runner = make_runner(hooks, max_iters=max_iters, train_dataloader=loader, **kwargs)
        if error is None:
            runner.train()
        else:
            with pytest.raises(NonFiniteError, match=error):
                runner.train()
        return runner, spoil

    return run


WHERE = {
    'picture': (nan_picture, 'loss_task is NaN or Inf, and so are the pictures .* number 1 of the'),
    'layer': (
        nan_after('backbone.layer2.0.conv1'),
        # Whose gate is not coupled: its feature is not kept, the next block's gate reads NaN.
        'loss_task .* so are the logits of backbone.gates.layer2-1-conv1',
    ),
    'gradient': (nan_gradient, 'the gradients of head.weight.* are NaN or Inf'),
}


@pytest.mark.parametrize('kind', WHERE)
def test_a_skipped_batch_leaves_nothing_behind(kind, train):
    do, _ = WHERE[kind]
    runner, spoil = train(do)
    assert_equal(spoil.states['before'], spoil.states['after'])
    assert spoil.outputs == {} and runner.iter == 4
    with open(runner.log_dir + f'/{runner.timestamp}.log') as file:
        log = file.read()
    assert 'FiniteHook: iteration 2 is skipped: ' in log and '1 batches were skipped' in log
    end = state_of(runner)
    assert all(torch.isfinite(value).all() for value in end.values())
    assert any(not torch.equal(end[key], spoil.states['after'][key]) for key in end)
    assert int(end['seen']) == 3 * 4  # the others were learned from


@pytest.mark.parametrize('kind', WHERE)
def test_stopping_names_the_place(kind, train):
    do, message = WHERE[kind]
    runner, spoil = train(do, 'stop', error=rf'iteration 2: {message}.*--resume goes on')
    assert 'after' not in spoil.states
    before, now = spoil.states['before'], state_of(runner)
    moved = [key for key in before if not torch.equal(before[key], now[key])]
    assert not [key for key in moved if 'running_' not in key and 'num_batches' not in key]


def test_the_layer_is_named(train, toy):
    model = toy.task()
    model.backbone.maxpool = nn.Sequential(model.backbone.maxpool, Poison())

    def do(runner, data_batch):
        runner.model.backbone.maxpool[1].on = True

    hooks = [dict(type='L0Hook')]
    message = r'the first layer is backbone.maxpool.1 \(Poison\), of all pictures'
    train(do, 'stop', hooks=hooks, model=model, error=message)


def test_a_gate_is_named_even_if_the_loss_is_finite(train):
    """NaN in a logit closes the channel, and nobody would see it."""

    def do(runner, data_batch):
        gate = find_gates(runner.model)['backbone.gates.layer3-0-conv1']

        def hook(module, args, out):
            handle.remove()
            gate.record.logits = gate.record.logits * math.nan

        handle = gate.register_forward_hook(hook)

    train(
        do, 'stop', hooks=[dict(type='L0Hook')], error='the logits of backbone.gates.layer3-0-conv1'
    )
    _, spoil = train(do, 'skip')
    assert_equal(spoil.states['before'], spoil.states['after'])


def test_a_loss_of_a_hook_is_named(train):
    def do(runner, data_batch):
        hook = next(h for h in runner.hooks if isinstance(h, BudgetHook))

        def loss(*args):
            del hook.loss  # the class's own shows again
            return hook.loss(*args) * math.nan

        hook.loss = loss

    train(do, 'stop', error='loss_budget is NaN or Inf')
    _, spoil = train(do, 'skip')
    assert_equal(spoil.states['before'], spoil.states['after'])


def test_too_many_in_a_row_stop(train, make_runner):
    always = tuple(range(1, 30))
    train(
        nan_picture, hooks=[], at=always, max_iters=30,
        error=r'iteration 11: .*11 batches in a row, more than FiniteHook.max_skips=10',
    )  # fmt: skip
    # Every other one is no row.
    runner, _ = train(nan_picture, hooks=[], at=always[::2], max_iters=30)
    hook = next(h for h in runner.hooks if isinstance(h, FiniteHook))
    assert hook.skipped == 15


def files_of(folder):
    return {f: os.path.getmtime(os.path.join(folder, f)) for f in os.listdir(folder) if '.pth' in f}


@pytest.mark.parametrize('action', ['stop', 'skip'])
@pytest.mark.parametrize('do', [nan_weight, huge_step])
def test_weights_that_are_no_numbers_replace_no_checkpoint(do, action, train):
    hooks = [dict(type='L0Hook')]
    error = 'NaN or Inf in' if do is huge_step else 'an earlier update has left|NaN or Inf in the w'
    runner, _ = train(do, action, hooks=hooks, at=(3,), error=error, default_hooks=SAVE)
    files = files_of(runner.work_dir)
    assert list(files) == ['iter_2.pth']
    saved = torch.load(os.path.join(runner.work_dir, 'iter_2.pth'), weights_only=False)
    assert all(torch.isfinite(value).all() for value in saved['state_dict'].values())
    with open(os.path.join(runner.work_dir, 'last_checkpoint')) as file:
        assert file.read().endswith('iter_2.pth')


def test_who_saves_at_another_time_is_stopped_too(train, make_runner):
    class Save(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            nan_weight(runner, None)
            runner.save_checkpoint(runner.work_dir, 'mine.pth')

    runner = make_runner([FiniteHook(), Save()], max_iters=2)
    with pytest.raises(NonFiniteError, match='no checkpoint is written: backbone'):
        runner.train()
    assert not files_of(runner.work_dir)


def test_weights_to_start_from(make_runner, toy):
    model = toy.task()
    with torch.no_grad():
        model.head.weight[0] = math.inf
    runner = make_runner([FiniteHook()], model=model, max_iters=2)
    with pytest.raises(NonFiniteError, match='the training starts with NaN or Inf in the weights'):
        runner.train()


def test_buffers_that_are_meant_to_be_infinite(make_runner, toy):
    """Masks of attention, for one."""
    model = toy.task()
    model.register_buffer('mask', torch.full((2,), -math.inf))
    runner = make_runner([FiniteHook()], model=model, max_iters=2, default_hooks=SAVE)
    runner.train()
    assert list(files_of(runner.work_dir)) == ['iter_2.pth']


def test_accumulated_gradients(train):
    wrapper = dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9), accumulative_counts=2)
    runner, _ = train(nan_gradient, at=(3,), optim_wrapper=wrapper, max_iters=8)
    assert all(torch.isfinite(value).all() for value in state_of(runner).values())
    assert next(h for h in runner.hooks if isinstance(h, FiniteHook)).skipped == 1


class Scaling(OptimWrapper):
    """As AmpOptimWrapper, which insists on a GPU: it leaves out what overflows by itself."""

    loss_scaler = None

    def step(self, **kwargs):
        params = [p for group in self.optimizer.param_groups for p in group['params']]
        if all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in params):
            super().step(**kwargs)


@pytest.mark.parametrize(('do', 'skipped'), [(nan_picture, 1), (nan_gradient, 0)])
def test_with_loss_scaling_a_batch_is_skipped_whatever_the_action(do, skipped, train, toy):
    model = toy.task()
    wrapper = Scaling(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    # Gradients are the scaler's: who keeps something of the batch, or moves gates, does so then.
    hooks = EVERYTHING if skipped else [dict(type='L0Hook')]
    runner, spoil = train(do, 'stop', hooks=hooks, model=model, optim_wrapper=wrapper)
    states = [
        {k: v for k, v in state.items() if skipped or k.endswith(('weight', 'bias'))}
        for state in (spoil.states['before'], spoil.states['after'])
    ]
    assert_equal(*states)
    assert next(h for h in runner.hooks if isinstance(h, FiniteHook)).skipped == skipped
    assert all(torch.isfinite(value).all() for value in state_of(runner).values())


def test_off_is_mmengines_way(train):
    runner, _ = train(nan_picture, 'off', hooks=[])
    assert not torch.isfinite(runner.model.head.weight).all()


def test_the_training_is_the_same_with_and_without(train):
    nothing = lambda runner, data_batch: None  # noqa: E731
    states = []
    for action in (None, 'stop', 'skip'):
        torch.manual_seed(0)
        scheduler = dict(type='ExponentialLR', gamma=0.9, by_epoch=False)
        with warnings.catch_warnings():
            warnings.filterwarnings('error', message='Seems like')  # who has replaced `step`?
            runner, _ = train(nothing, action, randomness=dict(seed=1), param_scheduler=scheduler)
        states.append(state_of(runner))
        assert 'train_step' not in vars(runner.model)
        assert 'FiniteHook' not in repr(vars(runner.optim_wrapper).get('step'))
    assert_equal(states[0], states[1])
    assert_equal(states[0], states[2])


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(action='ignore'), "action='ignore' must be one of stop, skip, off"),
        (dict(max_skips=-1), 'max_skips=-1 must be a whole number'),
        (dict(max_skips=True), 'max_skips=True must be a whole number'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        FiniteHook(**options)
    assert CheckpointHook.priority == 'VERY_LOW'  # the checks come before it
