# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Distillation, by training with it."""

import pytest
import torch
from mmengine.hooks import Hook

from fgc_mm.errors import CheckpointError, UsageError
from fgc_mm.gates import find_gates
from fgc_mm.training import DistillationHook
from fgc_mm.training.distillation.teacher import fingerprint

GATE = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'))
BUDGET = dict(type='BudgetHook', target=0.6, check_interval=2)
SAVING = dict(
    default_hooks=dict(
        logger=dict(type='LoggerHook', interval=1),
        checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=True),
    )
)


def hook_of(runner):
    return next(hook for hook in runner.hooks if isinstance(hook, DistillationHook))


class NoLabels:
    """Pictures whose data samples have nothing to learn from."""

    metainfo = dict()

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return dict(inputs=self.images[index], data_samples=None)


def model_of(toy, **gate):
    torch.manual_seed(0)
    return toy.task(dict(toy.backbone, gate=dict(GATE, **gate)))


def losses(probe, name):
    return [step[name] for step in probe.outputs if name in step]


def test_it_goes_beside_the_task(make_runner, toy):
    model, probe = model_of(toy), toy.probe(seed=5)
    same = dict(randomness=dict(seed=0))
    make_runner(
        [dict(type='DistillationHook', task=0.5), BUDGET, probe], model=model, **same
    ).train()
    for step in probe.outputs:
        assert step['loss'] == pytest.approx(
            step['loss_task'] + step['loss_distill'] + step['loss_budget'], rel=1e-5
        )
    whole = model_of(toy)
    other = toy.probe(seed=5)
    make_runner([dict(type='DistillationHook', task=1), BUDGET, other], model=whole, **same).train()
    first, second = probe.outputs[0], other.outputs[0]
    assert first['loss_task'] == pytest.approx(second['loss_task'] / 2, rel=1e-5)
    assert first['loss_distill'] == pytest.approx(second['loss_distill'])


def test_without_the_task_heads_stay_and_labels_are_not_read(make_runner, toy):
    model = model_of(toy)
    head = {name: value.clone() for name, value in model.head.state_dict().items()}
    loader = dict(
        dataset=NoLabels(toy.images().images),
        sampler=dict(type='DefaultSampler', shuffle=False),
        batch_size=4,
        num_workers=0,
        collate_fn=lambda items: dict(inputs=[item['inputs'] for item in items]),
    )
    called = []
    model.head.register_forward_hook(lambda *_: called.append(1))
    start = model.backbone.layer2[0].conv1.weight.clone()
    runner = make_runner(
        [dict(type='DistillationHook', task=0), BUDGET],
        model=model,
        train_dataloader=loader,
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=0.1)),
    )
    runner.train()
    assert not called
    assert all(torch.equal(value, head[name]) for name, value in model.head.state_dict().items())
    assert not torch.equal(model.backbone.layer2[0].conv1.weight, start)
    # Afterwards it is what it was.
    assert 'forward' not in model.__dict__
    assert model(toy.images().images).shape == (12, 4)


def test_logits_need_the_head_alone(make_runner, toy):
    model, probe = model_of(toy), toy.probe()
    hook = dict(type='DistillationHook', task=0, kl=1.0, weight=0.0)
    make_runner([hook, BUDGET, probe], model=model).train()
    assert set(probe.outputs[0]) == {'loss', 'loss_distill', 'loss_budget'}
    assert all(value > 0 for value in losses(probe, 'loss_distill'))


def test_accumulation_is_of_the_mean(make_runner, toy):
    model, probe = model_of(toy), toy.probe()
    optim = dict(optimizer=dict(type='SGD', lr=0.05), accumulative_counts=2)
    hooks = [dict(type='DistillationHook', task=0), BUDGET, probe]
    make_runner(hooks, model=model, optim_wrapper=optim, max_iters=4).train()
    assert all(torch.isfinite(torch.tensor(losses(probe, 'loss_distill'))))


def test_static_gates_learn_from_the_dense_network(make_runner, toy):
    torch.manual_seed(0)
    model, probe = toy.task(dict(toy.backbone, gate=dict(type='StaticGate'))), toy.probe()
    hooks = [
        dict(type='StaticPruningHook', criterion='features', target=0.6, batches=2),
        dict(type='DistillationHook', task=0),
        probe,
    ]
    make_runner(hooks, model=model, max_iters=30, batch_size=12).train()
    found = losses(probe, 'loss_distill')
    assert found[0] > 0.05 and found[-1] < 0.5 * found[0]


class Teachers(Hook):
    """The teacher of every step, whether the gates are forced open, and what the network is."""

    priority = 'VERY_LOW'

    def __init__(self):
        self.seen, self.forced, self.network = [], [], []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        found = hook_of(runner).distillation
        self.seen.append(None if found is None else found.token)
        gates = find_gates(runner.model).values()
        self.forced.append(any(gate.forced is not None for gate in gates))


def test_a_resumed_run_has_the_same_teacher(make_runner, toy, tmp_path):
    common = dict(train_cfg=dict(by_epoch=True, max_epochs=2), **SAVING)
    hooks = [dict(type='DistillationHook', task=0), BUDGET]
    first, probe = Teachers(), toy.probe(seed=5)
    make_runner([*hooks, first, probe], model=model_of(toy), **common).train()
    assert (tmp_path / 'epoch_1.teacher.pth').is_file() and len(set(first.seen)) == 1
    again, other = Teachers(), toy.probe(seed=5)
    start = dict(load_from=str(tmp_path / 'epoch_1.pth'), resume=True)
    make_runner([*hooks, again, other], model=model_of(toy), **start, **common).train()
    assert again.seen == first.seen[3:]
    assert other.outputs == probe.outputs[3:]


def test_the_dense_phase_makes_the_teacher(make_runner, toy, tmp_path):
    common = dict(train_cfg=dict(by_epoch=True, max_epochs=4), **SAVING)
    budget = dict(BUDGET, begin=0.5, reach=0.8)
    hooks = [dict(type='DistillationHook', teacher='dense_phase', dense_phase=0.4, task=0), budget]
    found, probe = Teachers(), toy.probe(seed=5)
    make_runner([*hooks, found, probe], model=model_of(toy), **common).train()
    # Of 12 steps five are dense, with the task's loss and no other.
    assert found.forced == [True] * 5 + [False] * 7
    assert found.seen[:5] == [None] * 5 and len(set(found.seen[5:])) == 1
    assert all('loss_task' in step and step['loss_distill'] == 0 for step in probe.outputs[:5])
    assert all('loss_task' not in step for step in probe.outputs[5:])
    assert all(float(mask.mean()) == 1 for mask in probe.masks[0].values())
    for epoch in (1, 3):  # in the dense phase, and after it
        again, other = Teachers(), toy.probe(seed=5)
        start = dict(load_from=str(tmp_path / f'epoch_{epoch}.pth'), resume=True)
        work = dict(work_dir=str(tmp_path / f'again{epoch}'))
        make_runner([*hooks, again, other], model=model_of(toy), **start, **common, **work).train()
        assert again.forced == found.forced[3 * epoch :]
        assert other.outputs == probe.outputs[3 * epoch :]


def test_a_teacher_from_a_file(make_runner, toy, tmp_path):
    dense = toy.task(dict(toy.backbone, gate=None))
    torch.save(dict(state_dict=dense.state_dict()), tmp_path / 'dense.pth')
    found = Teachers()
    hook = dict(type='DistillationHook', teacher=str(tmp_path / 'dense.pth'))
    make_runner([hook, BUDGET, found], model=model_of(toy)).train()
    assert set(found.seen) == {fingerprint(dense.backbone)}


def saved(make_runner, toy, tmp_path, hook):
    common = dict(train_cfg=dict(by_epoch=True, max_epochs=2), **SAVING)
    hooks = [BUDGET] if hook is None else [BUDGET, hook]
    make_runner(hooks, model=model_of(toy), **common).train()
    return dict(load_from=str(tmp_path / 'epoch_1.pth'), resume=True, **common)


def start_file(toy, path, seed=0):
    torch.manual_seed(seed)
    dense = toy.task(dict(toy.backbone, gate=None))
    torch.save(dict(state_dict=dense.state_dict()), path)
    return dict(type='DistillationHook', teacher=str(path))


def test_a_teacher_that_differs_on_resume(make_runner, toy, tmp_path):
    hook = start_file(toy, tmp_path / 'dense.pth')
    resumed = saved(make_runner, toy, tmp_path, hook)
    start_file(toy, tmp_path / 'dense.pth', seed=1)
    with pytest.raises(CheckpointError, match='is not the teacher that this training was begun'):
        make_runner([BUDGET, hook], model=model_of(toy), **resumed).train()
    with pytest.raises(CheckpointError, match="teacher='start', and the training to be resumed"):
        make_runner([BUDGET, dict(type='DistillationHook')], model=model_of(toy), **resumed).train()
    # The file may be gone: the teacher lies beside the checkpoint.
    (tmp_path / 'dense.pth').unlink()
    make_runner([BUDGET, hook], model=model_of(toy), **resumed).train()
    (tmp_path / 'epoch_1.teacher.pth').unlink()
    with pytest.raises(CheckpointError, match=r'epoch_1.teacher.pth, is neither beside it nor'):
        make_runner([BUDGET, hook], model=model_of(toy), **resumed).train()


def test_a_checkpoint_of_another_kind_of_training(make_runner, toy, tmp_path):
    resumed = saved(make_runner, toy, tmp_path, None)
    with pytest.raises(CheckpointError, match='was saved without DistillationHook'):
        make_runner([BUDGET, dict(type='DistillationHook')], model=model_of(toy), **resumed).train()


@pytest.mark.parametrize(
    ('hooks', 'message'),
    [
        ([dict(type='DistillationHook', task=-1)], 'task=-1 must be 0 or more'),
        ([dict(type='DistillationHook', dense_phase=1)], 'dense_phase=1 must be within'),
        ([dict(type='DistillationHook')] * 2, 'two of them'),
        (
            [dict(type='DistillationHook', teacher='dense_phase'), BUDGET],
            'BudgetHook closes them from begin=0 on',
        ),
    ],
)
def test_what_is_refused(hooks, message, make_runner, toy):
    with pytest.raises(UsageError, match=f'DistillationHook: .*{message}'):
        make_runner(hooks, model=model_of(toy)).train()


def test_a_model_without_gates(make_runner, toy):
    with pytest.raises(UsageError, match=r'DistillationHook: the model ToyTask .* has no gates'):
        make_runner(
            [dict(type='DistillationHook')], model=toy.task(dict(toy.backbone, gate=None))
        ).train()
