# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Feature-Gate Coupling, by training with it: against a dense float64 computation."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fgc_watch import FGC, LAST_TWO, Watch
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS

from fgc_mm.gates import find_gates
from fgc_mm.runtime import unwrap
from fgc_mm.training import FGCHook, epochs_seen


@pytest.fixture
def train(digits_cfg, build):
    """``train(hook, more hooks, **changes of the config)`` -> runner, watch."""

    def run(hook=FGC, more=(), **changes):
        built = [h for h in more if isinstance(h, Hook)]
        hooks = [hook, *(h for h in more if h not in built)]
        cfg = digits_cfg(hooks, **{'default_hooks.checkpoint': None, **changes})
        runner = build(cfg)
        watch = Watch()
        for extra in (*built, watch):
            runner.register_hook(extra)
        runner.train()
        return runner, watch

    return run


# What it computes


@pytest.mark.parametrize('form', ['log_sum', 'sum_log', 'mean_log'])
def test_loss_and_banks_are_those_of_the_equations(form, train):
    _, watch = train({**FGC, 'form': form})
    assert list(watch.banks) == LAST_TWO
    assert [len(batch['indices']) for batch in watch.batches] == [16, 16, 8] * 2
    for epoch in (0, 3):
        together = torch.cat([batch['indices'] for batch in watch.batches[epoch : epoch + 3]])
        assert together.sort().values.tolist() == list(range(40))
    watch.check(steps=6, form=form)
    assert watch.hook.coupling.epochs == 2.0


def test_the_gradient_comes_from_the_coupled_gates(train):
    """With the task switched off, whatever moves is moved by loss_fgc: the gate of
    the fifth block and what lies before it."""
    changes = {
        'model.head.loss': dict(type='CrossEntropyLoss', loss_weight=0.0),
        'optim_wrapper.optimizer': dict(_delete_=True, type='SGD', lr=0.1),
    }
    runner, watch = train({**FGC, 'layers': [4]}, max_epochs=1, **changes)
    watch.check(steps=3)
    before, after = find_gates(watch.start), find_gates(runner.model)
    moved = [not torch.equal(after[n].fc2.weight, before[n].fc2.weight) for n in after]
    assert moved == [True] * 5 + [False] * 4


def test_sources_and_spaces(train):
    for how in (dict(source='gate'), dict(shared=True), dict(space='probs')):
        _, watch = train({**FGC, **how}, max_epochs=1)
        watch.check(steps=3, **how)


def test_label_source(train):
    _, watch = train({**FGC, 'source': 'label', 'k': 9}, max_epochs=1)
    # Ten pictures of each class, so its nine others are the neighbors.
    labels = torch.arange(40) // 10
    for name, coupling in watch.hook.coupling.layers.items():
        assert coupling.label_source.labels.tolist() == labels.tolist()
        batch = watch.batches[0]
        bank = watch.banks[name][1]
        log_p = torch.log_softmax(batch['records'][name][1] @ bank.t() / 0.07, dim=1)
        same = labels[batch['indices']][:, None] == labels
        batch['loss'] += 0.1 * float(log_p.masked_fill(~same, -math.inf).logsumexp(1).mean())
    assert watch.batches[0]['loss'] == pytest.approx(0, abs=1e-4)


def test_warm_up_and_schedule_count_instances_seen(train):
    """An iteration-based loop, N = 40, batches of 16: 0, 0.4, 0.8, 1.2, 1.6 epochs."""
    hook = {**FGC, 'warmup_epochs': 0.5, 'eta': dict(start=0.4, end=1.2, value=0.1, begin=0.01)}
    _, watch = train(
        hook,
        train_cfg=dict(_delete_=True, by_epoch=False, max_iters=5),
        log_processor=dict(by_epoch=False),
        **{'train_dataloader.sampler': dict(type='InfiniteSampler', shuffle=True)},
    )
    etas = [0.01, 0.01, 0.055, 0.1, 0.1]
    for batch, eta in zip(watch.batches, etas, strict=True):
        batch['loss'] *= 0.1 / eta
    watch.check(steps=5, warmup=lambda step: step < 2)
    assert watch.hook.coupling.epochs == 2.0


def test_repeated_pictures_are_one_instance(train, digits_cfg):
    inner = digits_cfg().train_dataloader.dataset
    dataset = dict(_delete_=True, type='RepeatDataset', times=2, dataset=dict(**inner))
    runner, watch = train(max_epochs=1, **{'train_dataloader.dataset': dataset})
    assert watch.hook.coupling.num_instances == 40
    assert watch.hook.coupling.epochs == 2.0
    assert epochs_seen(runner) == 2.0  # the other hooks' schedules count alike
    # 32 of 80 items in a batch: some pictures come twice, and are mixed in twice.
    indices = [batch['indices'].tolist() for batch in watch.batches]
    assert any(len(set(batch)) < len(batch) for batch in indices)
    watch.check(steps=5)


# What it composes with


class Snapshot(Hook):
    """That validation leaves the banks alone."""

    def before_val(self, runner):
        hook = next(h for h in runner.hooks if isinstance(h, FGCHook))
        self.banks = [c.gate_bank.data.clone() for c in hook.coupling.layers.values()]
        self.seen, self.ran = hook.coupling.seen, getattr(self, 'ran', 0) + 1

    def after_val(self, runner):
        hook = next(h for h in runner.hooks if isinstance(h, FGCHook))
        assert self.seen == hook.coupling.seen
        for bank, c in zip(self.banks, hook.coupling.layers.values(), strict=True):
            assert torch.equal(bank, c.gate_bank.data)
        # Not even if the losses are asked for.
        data = next(iter(runner.train_dataloader))
        model = unwrap(runner.model)
        data = model.data_preprocessor(data, training=True)
        assert model(**data, mode='loss')['loss_fgc'] == 0
        assert self.seen == hook.coupling.seen


class AutocastCPU(OptimWrapper):
    """AmpOptimWrapper insists on a GPU."""

    def optim_context(self, model):
        return torch.autocast('cpu', torch.bfloat16)


VARIANTS = ['autocast', 'accumulation', 'ema', 'with_cp', 'val', 'workers', 'all']


@pytest.mark.parametrize('variant', VARIANTS)
def test_composes_with(variant, train, digits_cfg):
    more, changes = [], {}
    if variant == 'autocast':
        OPTIM_WRAPPERS.register_module(name='AutocastCPU', module=AutocastCPU, force=True)
        changes['optim_wrapper.type'] = 'AutocastCPU'
    if variant in ('accumulation', 'all'):
        changes['optim_wrapper.accumulative_counts'] = 2
    if variant in ('ema', 'all'):
        more.append(dict(type='EMAHook', momentum=0.1))
    if variant in ('with_cp', 'all'):
        changes['model.backbone.with_cp'] = True
    if variant == 'workers':
        changes['train_dataloader'] = dict(num_workers=1, persistent_workers=True)
    if variant in ('val', 'all'):
        loader = digits_cfg(work_dir='unused').train_dataloader
        changes.update(val_dataloader=loader, val_cfg=dict(), val_evaluator=dict(type='Accuracy'))
        more.append(Snapshot())
    if variant == 'all':
        more += [dict(type='L0Hook', rho=0.4), dict(type='BatchShapingHook', zeta=0.1)]
    runner, watch = train(more=more, **changes)
    watch.check(steps=6)
    before = find_gates(watch.start)
    for name, gate in find_gates(runner.model).items():
        assert not torch.equal(gate.fc2.weight, before[name].fc2.weight)
    if variant in ('val', 'all'):
        assert next(h for h in more if isinstance(h, Snapshot)).ran == 2


def test_bottlenecks_couple_all_their_gates(digits_cfg, build):
    backbone = dict(_delete_=True, type='GatedResNet', depth=50, base_channels=4, stem_channels=4)
    cfg = digits_cfg(
        [{**FGC, 'layers': 'last_stage'}],
        max_epochs=1,
        **{'model.backbone': backbone, 'model.head.in_channels': 128},
    )
    runner = build(cfg)
    watch = Watch()
    runner.register_hook(watch)
    runner.train()
    names = [f'backbone.gates.layer4-{block}-conv{i}' for block in range(3) for i in (1, 2)]
    assert list(watch.banks) == names
    watch.check(steps=3)


# What it logs


def test_overlap_and_turnover_are_logged(train):
    runner, watch = train()
    watch.check(steps=6)
    hub = runner.message_hub
    overlaps = []
    for name, (v_f, v_g) in watch.banks.items():
        near = []
        for bank in (v_f, v_g):
            similarity = bank @ bank.t()
            similarity.fill_diagonal_(-math.inf)
            near.append([set(row.tolist()) for row in similarity.topk(5, dim=1).indices])
        overlap = np.mean([len(f & g) / 5 for f, g in zip(*near, strict=True)])
        overlaps.append(overlap)
        assert hub.get_scalar(f'fgc/overlap/{name}').current() == pytest.approx(overlap, abs=0.01)
    logged = hub.get_scalar('train/fgc/overlap').current()
    assert logged == pytest.approx(np.mean(overlaps), abs=0.01)

    last = {}
    for step, chosen in enumerate(watch.neighbors):
        changed = []
        for name, near in chosen.items():
            for i, row in zip(watch.batches[step]['indices'].tolist(), near.tolist(), strict=True):
                if (name, i) in last:
                    changed.append(1 - len(set(row) & last[name, i]) / 5)
                last[name, i] = set(row)
    logged = hub.get_scalar('train/fgc/turnover').current()
    assert logged == pytest.approx(np.mean(changed), abs=0.01)
    assert len(hub.get_scalar('train/fgc/turnover').data[0]) == 3  # not in the first epoch

    (log,) = Path(runner.work_dir).rglob('*.log')
    shown = [line for line in log.read_text().splitlines() if 'Epoch(train) [2]' in line]
    assert len(shown) == 3
    for key in ('loss_fgc: ', 'fgc/overlap: ', 'fgc/turnover: '):
        assert all(key in line for line in shown)
    (scalars,) = Path(runner.work_dir).rglob('scalars.json')
    lines = [json.loads(line) for line in scalars.read_text().splitlines()]
    assert any(f'fgc/turnover/{LAST_TWO[0]}' in line for line in lines)


@pytest.mark.parametrize('action', [None, 'off', 'stop', 'skip'])
def test_the_hook_looks_unless_finite_hook_has(action, digits_cfg, build, monkeypatch):
    looked = []
    look = 'fgc_mm.coupling.coupling.check_finite'
    monkeypatch.setattr(look, lambda batch, when: looked.append(when))
    finite = [] if action is None else [dict(type='FiniteHook', action=action)]
    runner = build(digits_cfg([FGC, *finite], max_epochs=1))
    runner.train()
    steps = [f'at iteration {step}' for step in range(1, runner.iter + 1)]
    assert looked == (steps if action in (None, 'off') else [])
