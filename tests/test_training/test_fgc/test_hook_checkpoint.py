# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Checkpoints of Feature-Gate Coupling: what is saved, resumed, refused and ignored."""

import gc
import os
import shutil
from pathlib import Path

import pytest
import torch
from mmengine.hooks import EMAHook, Hook

from fgc_mm.runtime import RandomStateHook
from fgc_mm.runtime.checkpoints.companions import read_companion
from fgc_mm.runtime.checkpoints.random_state_hook import checkpoint_due
from fgc_mm.training import FGCHook

FGC = dict(type='FGCHook', layers=[-2, -1], k=5, eta=0.1, log_interval=2)


def fgc(runner):
    return next((h for h in runner.hooks if isinstance(h, FGCHook)), None)


@pytest.fixture
def train(build):
    def run(cfg):
        runner = build(cfg)
        runner.train()
        runner.final = everything(runner)
        return runner

    return run


def everything(runner):
    """All that a step depends on."""
    state = {f'model.{k}': v for k, v in runner.model.state_dict().items()}
    for i, buffers in runner.optim_wrapper.state_dict()['state'].items():
        state.update({f'optimizer.{i}.{k}': v for k, v in buffers.items()})
    for hook in runner.hooks:
        if isinstance(hook, EMAHook):
            state.update({f'ema.{k}': v for k, v in hook.ema_model.state_dict().items()})
    hook = fgc(runner)
    if hook is None:
        return state
    for name, c in hook.coupling.layers.items():
        state[f'{name}.feature'] = c.feature_bank.data
        state[f'{name}.gate'] = c.gate_bank.data
    for name, meter in hook.coupling.meters.items():
        state[f'{name}.turnover'] = meter.last
    state['seen'] = torch.tensor(hook.coupling.seen)
    state['random'] = torch.get_rng_state()
    return {k: v.clone() for k, v in state.items() if v is not None}


def assert_same(runner, other):
    mine, others = runner.final, other.final
    assert mine.keys() == others.keys() and len(mine) > 100
    different = [key for key in mine if not torch.equal(mine[key], others[key])]
    assert not different, different


def log_of(runner):
    logs = sorted(Path(runner.work_dir).rglob('*.log'), key=os.path.getmtime)
    return logs[-1].read_text()


def move(source, target, name):
    """A checkpoint and its banks, taken to another folder."""
    os.makedirs(target, exist_ok=True)
    for file in (f'{name}.pth', f'{name}.banks.pth'):
        shutil.copy(os.path.join(source, file), os.path.join(target, file))
    return os.path.join(target, f'{name}.pth')


# A run of 2E and a run resumed at E


@pytest.fixture
def changes(digits_cfg):
    """Everything that keeps a state: validation, EMA, schedules, a seed that is drawn."""
    loader = digits_cfg(work_dir='unused').train_dataloader
    return dict(
        randomness=dict(seed=None),
        val_dataloader=loader,
        val_cfg=dict(),
        val_evaluator=dict(type='Accuracy'),
        param_scheduler=[dict(type='MultiStepLR', milestones=[1, 3], gamma=0.5)],
        optim_wrapper=dict(optimizer=dict(weight_decay=1e-4, nesterov=True)),
    )


HOOKS = [
    {**FGC, 'warmup_epochs': 1, 'eta': dict(start=0, end=3, value=0.2)},
    dict(type='EMAHook', momentum=0.1),
    dict(type='L0Hook', rho=dict(start=0, end=3, value=0.4)),
]


def test_resumed_epochs_are_the_same_with_layers_side_by_side(
    digits_cfg, changes, tmp_path, train, two_threads
):
    hooks = [{**HOOKS[0], 'layers': [-2, -1]}, *HOOKS[1:]]
    full = train(digits_cfg(hooks, max_epochs=3, **changes))
    checkpoint = move(full.work_dir, tmp_path / 'elsewhere', 'epoch_2')
    cfg = digits_cfg(hooks, work_dir='again', max_epochs=3, **changes)
    cfg.update(resume=True, load_from=checkpoint)
    assert_same(full, train(cfg))


def test_resumed_epochs_are_the_same(digits_cfg, changes, tmp_path, train):
    full = train(digits_cfg(HOOKS, max_epochs=4, **changes))
    checkpoint = move(full.work_dir, tmp_path / 'elsewhere', 'epoch_2')
    cfg = digits_cfg(HOOKS, work_dir='again', max_epochs=4, **changes)
    cfg.update(resume=True, load_from=checkpoint)
    resumed = train(cfg)
    assert 'banks resumed from' in log_of(resumed)
    assert resumed.train_dataloader.sampler.seed == full.train_dataloader.sampler.seed
    assert_same(full, resumed)

    # It is the random states that do it.
    saved = torch.load(checkpoint, weights_only=False)
    del saved['random_states']
    torch.save(saved, checkpoint)
    cfg = digits_cfg(HOOKS, work_dir='third', max_epochs=4, **changes)
    cfg.update(resume=True, load_from=checkpoint)
    with pytest.raises(AssertionError, match=r'backbone\.conv1\.weight'):
        assert_same(full, train(cfg))


def test_a_stopped_run_resumes_by_itself(digits_cfg, train):
    """Two epochs, the same folder again with four, ``resume=True`` alone."""
    full = train(digits_cfg([FGC], work_dir='full', max_epochs=4))
    train(digits_cfg([FGC], max_epochs=2))
    resumed = train(digits_cfg([FGC], max_epochs=4, resume=True))
    assert_same(full, resumed)


def test_resumed_iterations_are_the_same(digits_cfg, tmp_path, train):
    """An iteration-based loop stopped in the middle of an epoch."""
    loop = {
        'train_cfg': dict(_delete_=True, by_epoch=False, max_iters=8),
        'log_processor': dict(by_epoch=False),
        'train_dataloader.sampler': dict(type='InfiniteSampler', shuffle=True),
        'default_hooks.checkpoint': dict(by_epoch=False, interval=4),
    }
    full = train(digits_cfg(HOOKS, **loop))
    checkpoint = move(full.work_dir, tmp_path / 'elsewhere', 'iter_4')
    resumed = train(digits_cfg(HOOKS, work_dir='again', resume=True, load_from=checkpoint, **loop))
    assert fgc(resumed).coupling.epochs == 8 * 16 / 40
    assert_same(full, resumed)


@pytest.mark.parametrize('storage', ['mmap', 'host'])
def test_banks_of_other_kinds_are_resumed(storage, digits_cfg, tmp_path, train):
    hook = {**FGC, 'bank_dtype': 'float16', 'bank_storage': storage, 'source': 'gate'}
    if storage == 'mmap':
        hook['mmap_dir'] = str(tmp_path / 'mapped')
    full = train(digits_cfg([hook], work_dir='full'))
    states = full.final
    checkpoint = move(full.work_dir, tmp_path / 'elsewhere', 'epoch_1')
    del full  # and with it the locks on its files
    gc.collect()
    resumed = train(digits_cfg([hook], work_dir='again', resume=True, load_from=checkpoint))
    again = resumed.final
    assert not [key for key in states if not torch.equal(states[key], again[key])]


# Files


def test_files_beside_the_checkpoints(digits_cfg, changes, train):
    changes['val_cfg'] = dict()
    checkpoint = {'default_hooks.checkpoint': dict(max_keep_ckpts=2, save_best='auto')}
    runner = train(digits_cfg([FGC], max_epochs=4, **changes, **checkpoint))
    files = sorted(f for f in os.listdir(runner.work_dir) if f.endswith('.pth'))
    best = [f for f in files if f.startswith('best')]
    assert len(best) == 1 and not best[0].endswith('.banks.pth')
    assert [f for f in files if f not in best] == [
        'epoch_3.banks.pth', 'epoch_3.pth', 'epoch_4.banks.pth', 'epoch_4.pth',
    ]  # fmt: skip
    saved = read_companion(os.path.join(runner.work_dir, 'epoch_4.banks.pth'))
    for name, c in fgc(runner).coupling.layers.items():
        assert torch.equal(saved['layers'][name]['gate']['data'], c.gate_bank.data)
    assert not [f for f in os.listdir(runner.work_dir) if f.endswith('.partial')]
    # A resumed run removes those an earlier process has written.
    cfg = digits_cfg([FGC], max_epochs=5, resume=True, **changes, **checkpoint)
    files = os.listdir(train(cfg).work_dir)
    assert sorted(f for f in files if f.endswith('.banks.pth')) == [
        'epoch_4.banks.pth', 'epoch_5.banks.pth',
    ]  # fmt: skip
    # The runner's own method is back in its place.
    assert 'save_checkpoint' not in vars(runner)


def test_switched_off(digits_cfg, train):
    hook = {**FGC, 'save_banks': False}
    runner = train(digits_cfg([hook], max_epochs=1))
    assert not [f for f in os.listdir(runner.work_dir) if 'banks' in f]
    resumed = train(digits_cfg([hook], max_epochs=2, resume=True))
    assert 'resuming with fresh banks' in log_of(resumed)
    assert fgc(resumed).coupling.epochs == 2.0


# Refused and ignored


def test_what_does_not_fit_is_refused(digits_cfg, tmp_path, train, build):
    first = train(digits_cfg([FGC], max_epochs=2, **{'model.backbone.depth': 20}))
    folder = Path(first.work_dir)

    def resume(message, error=ValueError, hook=FGC, name='epoch_2', **changes):
        cfg = digits_cfg(
            [hook], work_dir='again', max_epochs=3, resume=True,
            load_from=str(folder / f'{name}.pth'), **changes,
        )  # fmt: skip
        runner = build(cfg)
        with pytest.raises(error, match=message):
            runner.train()
        assert runner.iter == 6 if name == 'epoch_2' else True

    resume(
        'of a training set of 40 instances, this one has 30.*fresh_banks=True',
        **{'train_dataloader.dataset.indices': 30},
    )
    resume(
        r"banks of the gates .*layer3-1-conv1.*coupled are \['backbone.gates.layer3-2-conv1'\]",
        hook={**FGC, 'layers': [-1]},
    )
    resume(
        'gates.layer3-1-conv1: feature bank: .*dtype is .float32. there and .float16. here',
        hook={**FGC, 'bank_dtype': 'float16'},
    )
    # Of another width: the gates of the first blocks, under the names of the last.
    banks = torch.load(folder / 'epoch_2.banks.pth', weights_only=True)
    narrow = {
        name: {
            **layer,
            'feature': {**layer['feature'], 'dim': 32, 'data': layer['feature']['data'][:, :32]},
        }
        for name, layer in banks['layers'].items()
    }
    torch.save({**banks, 'layers': narrow}, folder / 'epoch_2.banks.pth')
    resume('dim is 32 there and 64 here')
    # Of another checkpoint, and missing.
    shutil.copy(folder / 'epoch_1.banks.pth', folder / 'epoch_2.banks.pth')
    resume('belongs to another checkpoint')
    os.remove(folder / 'epoch_2.banks.pth')
    resume('epoch_2.banks.pth, are neither beside it.*fresh_banks=True')
    hook = {**FGC, 'fresh_banks': True}
    cfg = digits_cfg([hook], work_dir='again', max_epochs=3, resume=True)
    cfg.load_from = str(folder / 'epoch_2.pth')
    resumed = train(cfg)
    assert 'resuming with fresh banks' in log_of(resumed) and resumed.iter == 9
    assert fgc(resumed).coupling.epochs == 3.0


def test_a_checkpoint_of_a_training_without_banks_is_refused(digits_cfg, train):
    train(digits_cfg([dict(type='L0Hook')], max_epochs=1))
    with pytest.raises(ValueError, match=r'was saved without banks.*fresh_banks=True'):
        train(digits_cfg([FGC], max_epochs=2, resume=True))


def test_load_from_and_testing_ignore_banks(digits_cfg, changes, train, build):
    first = train(digits_cfg([FGC], max_epochs=1, **changes))
    checkpoint = os.path.join(first.work_dir, 'epoch_1.pth')
    os.remove(os.path.join(first.work_dir, 'epoch_1.banks.pth'))
    notice = 'FGCHook: {} takes the weights only; the banks in epoch_1.banks.pth are ignored'

    # Of another size, too.
    fewer = {'train_dataloader.dataset.indices': 30}
    second = train(
        digits_cfg([FGC], work_dir='second', max_epochs=1, load_from=checkpoint, **changes, **fewer)
    )
    assert notice.format('load_from') in log_of(second)
    assert fgc(second).coupling.seen == 30

    test = dict(test_dataloader=changes['val_dataloader'], test_cfg=dict())
    test.update(test_evaluator=changes['val_evaluator'], load_from=checkpoint)
    runner = build(digits_cfg([FGC], work_dir='third', **test))
    runner.test()
    assert notice.format('testing') in log_of(runner)


# Random states


def test_all_ranks_know_when_a_checkpoint_is_due(digits_cfg, build):
    """They gather their states then; the saving itself only the first one sees."""
    due = []

    class Ask(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if checkpoint_due(runner):
                due.append(f'iter_{runner.iter + 1}.pth')

    loop = {
        'train_cfg': dict(_delete_=True, by_epoch=False, max_iters=7),
        'log_processor': dict(by_epoch=False),
        'train_dataloader.sampler': dict(type='InfiniteSampler', shuffle=True),
        'default_hooks.checkpoint': dict(by_epoch=False, interval=2, save_begin=3),
    }
    runner = build(digits_cfg([FGC], **loop))
    runner.register_hook(Ask())
    runner.train()
    files = [f for f in os.listdir(runner.work_dir) if f.startswith('iter') and 'banks' not in f]
    assert sorted(files) == due and len(due) == 3


def test_validation_does_not_disturb_the_training(digits_cfg, changes, train):
    """The same weights with and without it."""
    changes['randomness'] = dict(seed=5)
    hooks = [FGC, dict(type='RandomStateHook')]
    with_val = train(digits_cfg(hooks, **changes))
    assert len([h for h in with_val.hooks if isinstance(h, RandomStateHook)]) == 1
    for key in ('val_dataloader', 'val_cfg', 'val_evaluator'):
        changes.pop(key)
    assert_same(with_val, train(digits_cfg(hooks, work_dir='without', **changes)))
