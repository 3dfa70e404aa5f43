# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The gate losses, by training with them."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from left_hooks import hooks_on
from mmengine.hooks import EMAHook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS

from fgc_mm.gates import find_gates
from fgc_mm.macs import count_macs
from fgc_mm.training import BatchShapingHook, GateLossHook, L0Hook, batch_shaping, epochs_seen

BOTH = [
    dict(type='L0Hook', rho=0.4),
    dict(type='BatchShapingHook', zeta=0.75),
]


def mean_prob(probs):
    return float(torch.cat([p.flatten() for p in probs.values()]).mean())


def test_the_losses_are_summed_and_right(make_runner, toy):
    probe = toy.probe()
    make_runner([*BOTH, probe]).train()
    assert len(probe.outputs) == 3
    for outputs, probs in zip(probe.outputs, probe.probs, strict=True):
        l0 = 0.4 * mean_prob(probs)
        shaping = 0.75 * sum(float(batch_shaping(p)) for p in probs.values())
        assert outputs['loss_l0'] == pytest.approx(l0, rel=1e-5)
        assert outputs['loss_batch_shaping'] == pytest.approx(shaping, rel=1e-5)
        assert outputs['loss'] == pytest.approx(outputs['loss_task'] + l0 + shaping, rel=1e-5)


def test_the_step_is_that_of_the_summed_loss(make_runner, toy):
    """One SGD step, against the same step written out."""
    model, probe = toy.task(), toy.probe(seed=7)
    make_runner([*BOTH, probe], model=model, n=4).train()
    reference = probe.start.train()

    batch = [toy.images(4)[i] for i in range(4)]
    torch.manual_seed(7)
    losses = reference([b['inputs'] for b in batch], [b['data_samples'] for b in batch], 'loss')
    probs = {name: gate.record.probs for name, gate in find_gates(reference).items()}
    total = sum(p.numel() for p in probs.values())
    loss = losses['loss_task'] + 0.4 * sum(p.sum() for p in probs.values()) / total
    loss = loss + 0.75 * sum(batch_shaping(p) for p in probs.values())
    loss.backward()
    with torch.no_grad():
        for param in reference.parameters():
            param -= 0.1 * param.grad
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


def test_l0_closes_gates(make_runner, toy):
    probe = toy.probe()
    model = toy.task(task_weight=0.0)
    hooks = [dict(type='L0Hook', rho=500.0), probe]
    make_runner(hooks, model=model, max_iters=30).train()
    assert mean_prob(probe.probs[-1]) < mean_prob(probe.probs[0]) - 0.1


def test_macs_cost_weighs_a_channel_by_what_it_turns_off(make_runner, toy):
    probe, model = toy.probe(), toy.task()
    make_runner([dict(type='L0Hook', rho=1.0, cost='macs'), probe], model=model, n=4).train()
    # What closing one channel alone saves, counted.
    images = toy.images(4).images
    model.eval()
    gates = find_gates(model)
    for gate in gates.values():
        gate.forced = 1.0
    full = count_macs(model, images, backbone='backbone')[0].backbone_executed
    weighted = total = 0.0
    for name, gate in gates.items():
        gate.forced = torch.ones(gate.channels)
        gate.forced[0] = 0
        saved = full - count_macs(model, images, backbone='backbone')[0].backbone_executed
        gate.forced = 1.0
        weighted += saved * float(probe.probs[0][name].sum())
        total += saved * probe.probs[0][name].numel()
    assert probe.outputs[0]['loss_l0'] == pytest.approx(weighted / total, rel=1e-5)
    assert not hooks_on(model)


def test_schedules_follow_instances_seen(make_runner, toy):
    ramp = dict(start=0.5, end=1.5, value=1.0)

    def rho(probe):
        return [
            outputs['loss_l0'] / mean_prob(probs)
            for outputs, probs in zip(probe.outputs, probe.probs, strict=True)
        ]

    # 10 instances in batches of 4: three iterations an epoch, the last with 2.
    probe = toy.probe()
    make_runner(
        [dict(type='L0Hook', rho=ramp), probe],
        n=10,
        train_cfg=dict(by_epoch=True, max_epochs=2),
    ).train()
    assert rho(probe) == pytest.approx([0, 0, 1 / 6, 0.5, 5 / 6, 1], abs=1e-5)
    # An infinite sampler: every iteration sees 4 of 10.
    probe = toy.probe()
    make_runner([dict(type='L0Hook', rho=ramp), probe], n=10, max_iters=6).train()
    assert rho(probe) == pytest.approx([0, 0, 0.3, 0.7, 1, 1], abs=1e-5)


def test_epochs_after_resuming(make_runner, toy):
    every = dict(type='CheckpointHook', interval=5, by_epoch=False)
    make_runner(n=10, max_iters=5, default_hooks=dict(checkpoint=every)).train()
    resumed = make_runner(n=10, max_iters=5)
    resumed.resume(os.path.join(resumed.work_dir, 'iter_5.pth'))
    assert epochs_seen(resumed) == 2.0


def test_zeta_falls_to_zero_and_then_costs_nothing(make_runner, toy):
    probe = toy.probe()
    hook = dict(type='BatchShapingHook', zeta=dict(start=0, end=1, begin=0.75, value=0))
    make_runner([hook, probe], n=12, max_iters=5).train()
    ratios = [
        o['loss_batch_shaping'] / sum(float(batch_shaping(p)) for p in probs.values())
        for o, probs in zip(probe.outputs, probe.probs, strict=True)
    ]
    assert ratios == pytest.approx([0.75, 0.5, 0.25, 0, 0], abs=1e-5)


def test_history_joins_the_last_batches(make_runner, toy):
    probe = toy.probe()
    make_runner([dict(type='BatchShapingHook', zeta=1.0, history=2), probe], max_iters=4).train()
    for i, outputs in enumerate(probe.outputs):
        expected = 0.0
        for name, probs in probe.probs[i].items():
            earlier = [probe.probs[j][name] for j in range(max(0, i - 2), i)]
            joint = torch.cat([*earlier, probs])
            expected += float(batch_shaping(probs, joint=joint, start=len(joint) - len(probs)))
        assert outputs['loss_batch_shaping'] == pytest.approx(expected, rel=1e-5)


def test_openness_is_logged(make_runner, toy, tmp_path):
    probe = toy.probe()
    hooks = [{**hook, 'log_interval': 2} for hook in BOTH]
    runner = make_runner([*hooks, probe])
    runner.train()
    hub = runner.message_hub
    channels = torch.cat([m.flatten() for m in probe.masks[-1].values()])
    assert hub.get_scalar('train/gate/openness').current() == pytest.approx(float(channels.mean()))
    assert len(hub.get_scalar('train/gate/openness').data[0]) == 3
    # By layer at every second iteration, in the backends' files but not on the console.
    (scalars,) = Path(tmp_path).rglob('scalars.json')
    lines = [json.loads(line) for line in scalars.read_text().splitlines()]
    by_layer = [line for line in lines if any('gate/openness/' in key for key in line)]
    assert [line['step'] for line in by_layer] == [2]
    for name, mask in probe.masks[1].items():
        assert by_layer[0][f'gate/openness/{name}'] == pytest.approx(float(mask.mean()))
    (log,) = Path(tmp_path).rglob('*.log')
    shown = [line for line in log.read_text().splitlines() if 'Epoch(train)' in line]
    assert all('gate/openness: ' in line and 'gate/openness/' not in line for line in shown)
    assert all('loss_l0: ' in line for line in shown) and len(shown) == 3


def test_ema_copies_carry_no_hook(make_runner, toy):
    ema = EMAHook()
    probe, model = toy.probe(), toy.task()
    copied = []

    class Copier(GateLossHook):
        """A model copied in the middle of training."""

        loss_name = 'loss_none'

        def loss(self, gates, data_samples, runner):
            copied.append(copy.deepcopy(runner.model))
            return torch.zeros(())

    make_runner([*BOTH, ema, probe, Copier()], model=model).train()
    batch = toy.images(4)
    inputs = [batch[i]['inputs'] for i in range(4)]
    samples = [batch[i]['data_samples'] for i in range(4)]
    for other in (ema.ema_model.module, copied[0], model):
        assert set(other(inputs, samples, 'loss')) == {'loss_task'}
    assert not hooks_on(model)
    assert all('loss_l0' in outputs for outputs in probe.outputs)
    for gate in find_gates(ema.ema_model).values():
        assert gate.record is None or not gate.record.logits.requires_grad


@pytest.mark.parametrize('variant', ['with_cp', 'accumulation', 'autocast', 'norm_eval'])
def test_gates_learn_from_the_loss_under(variant, make_runner, toy):
    backbone, optim = dict(toy.backbone), dict(optimizer=dict(type='SGD', lr=0.1))
    if variant == 'with_cp':
        backbone.update(with_cp=True)
    if variant == 'norm_eval':
        backbone.update(norm_eval=True, frozen_stages=4)
    if variant == 'accumulation':
        optim.update(accumulative_counts=3)
    model = toy.task(backbone, task_weight=0.0)
    if variant == 'autocast':
        optim = AutocastCPU(torch.optim.SGD(model.parameters(), lr=0.1))
    probe = toy.probe()
    # Checkpointed convolutions run twice; the costs must stand that.
    cost = 'macs' if variant == 'with_cp' else 'channels'
    hooks = [dict(BOTH[0], cost=cost), BOTH[1], probe]
    make_runner(hooks, model=model, optim_wrapper=optim).train()
    before = find_gates(probe.start)
    for name, gate in find_gates(model).items():
        assert (gate.fc2.bias != before[name].fc2.bias).all(), name
    if cost == 'channels':
        expected = 0.4 * mean_prob(probe.probs[0])
        assert probe.outputs[0]['loss_l0'] == pytest.approx(expected, rel=1e-5)
    assert all(p.dtype == torch.float32 for p in probe.probs[0].values())


class AutocastCPU(OptimWrapper):
    """AmpOptimWrapper insists on a GPU."""

    def optim_context(self, model):
        return torch.autocast('cpu', torch.bfloat16)


def test_accumulation_averages_the_gate_loss(make_runner, toy):
    """Three accumulated batches make one step of the mean gradient."""
    model = toy.task(dict(toy.backbone, norm_eval=True), task_weight=0.0)
    for gate in find_gates(model).values():
        gate.fc1.requires_grad_(False)
        gate.norm.requires_grad_(False)
        gate.fc2.weight.requires_grad_(False)
    probe = toy.probe()
    optim = dict(optimizer=dict(type='SGD', lr=0.1), accumulative_counts=3)
    make_runner([dict(type='L0Hook', rho=1.0), probe], model=model, optim_wrapper=optim).train()
    total = sum(p.numel() for p in probe.probs[0].values())
    before = find_gates(probe.start)
    for name, gate in find_gates(model).items():
        slope = sum((p[name] * (1 - p[name])).sum(0) for p in probe.probs) / total / 3
        torch.testing.assert_close(gate.fc2.bias, before[name].fc2.bias - 0.1 * slope)


def test_a_model_without_gates_is_refused_before_training(make_runner, toy):
    model = toy.task(dict(toy.backbone, gate=None))
    runner = make_runner([dict(type='L0Hook')], model=model)
    with pytest.raises(ValueError, match=r'L0Hook: the model ToyTask \(backbone ResNet\)'):
        runner.train()
    assert runner.iter == 0


def test_gates_that_do_not_run_have_no_loss(make_runner, toy):
    model = toy.task()
    model.backbone.layer4[1] = torch.nn.Identity()
    runner = make_runner([dict(type='L0Hook'), dict(type='BatchShapingHook')], model=model)
    runner.train()
    records = {name: gate.record for name, gate in find_gates(runner.model).items()}
    assert records.pop('backbone.gates.layer4-1-conv1') is None
    assert None not in records.values()


def test_a_pass_that_leaves_the_backbone_out_is_refused(make_runner, toy):
    class HeadOnly(toy.task):
        first = True

        def forward(self, inputs, data_samples=None, mode='tensor'):
            if self.first:
                self.first = False
                return super().forward(inputs, data_samples, mode)
            # The records of the first iteration must not be taken for this one's.
            return dict(loss_task=self.head.weight.sum())

    with pytest.raises(RuntimeError, match='none of the 8 gates ran in this forward pass'):
        make_runner([dict(type='L0Hook')], model=HeadOnly()).train()


def test_the_same_hook_twice_is_refused(make_runner):
    with pytest.raises(ValueError, match="already have 'loss_l0'"):
        make_runner([dict(type='L0Hook'), dict(type='L0Hook')]).train()


def test_positional_batches_and_data_samples_reach_the_loss(make_runner, toy):
    """A data preprocessor may return a tuple; the samples are still found."""
    seen = []

    class Looks(GateLossHook):
        loss_name = 'loss_looks'

        def loss(self, gates, data_samples, runner):
            seen.append([sample.sample_idx for sample in data_samples])
            return torch.zeros(())

    class Positional(toy.task):
        def train_step(self, data, optim_wrapper):
            data = (data['inputs'], data['data_samples'])
            return super().train_step(data, optim_wrapper)

    for model in (toy.task(), Positional()):
        seen.clear()
        make_runner([Looks()], model=model).train()
        assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_misspelled_key_is_named():
    with pytest.raises(TypeError, match=r"L0Hook.*'roh'"):
        HOOKS.build(dict(type='L0Hook', roh=0.4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason='requires CUDA')
def test_amp_on_a_gpu(make_runner, toy):
    probe = toy.probe()
    optim = dict(type='AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.1))
    make_runner([*BOTH, probe], optim_wrapper=optim).train()
    for outputs, probs in zip(probe.outputs, probe.probs, strict=True):
        assert outputs['loss_l0'] == pytest.approx(0.4 * mean_prob(probs), rel=1e-4)


def test_registered_for_every_scope():
    assert HOOKS.get('L0Hook') is L0Hook
    assert HOOKS.get('BatchShapingHook') is BatchShapingHook
