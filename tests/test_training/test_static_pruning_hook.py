# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Static pruning, by training what is left."""

import pytest
import torch
from mmengine.hooks import Hook

from fgc_mm.gates import find_gates
from fgc_mm.macs import count_macs

STATIC = dict(type='StaticGate')


class Masks(Hook):
    """The channels of every step."""

    priority = 'VERY_LOW'

    def __init__(self):
        self.seen = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        gates = find_gates(runner.model).values()
        self.seen.append(torch.cat([gate.mask.clone() for gate in gates]))


def share(model, images):
    model.eval()
    counted = count_macs(model, images, backbone='backbone')
    return sum(i.backbone_executed for i in counted) / sum(i.backbone_dense for i in counted)


@pytest.mark.parametrize('criterion', ['l2', 'taylor', 'features', 'random'])
def test_a_training_with_what_is_left(criterion, make_runner, toy):
    model = toy.task(dict(toy.backbone, gate=STATIC))
    masks = Masks()
    hook = dict(type='StaticPruningHook', criterion=criterion, target=0.6, batches=2)
    runner = make_runner([hook, dict(type='GatedMACsHook'), masks], model=model)
    start = model.backbone.layer2[0].conv1.weight.clone()
    runner.train()
    assert share(model, toy.images(4).images) == pytest.approx(0.6, abs=0.01)
    assert len(masks.seen) == 3
    assert all(torch.equal(each, masks.seen[0]) for each in masks.seen)
    mask = find_gates(model)['backbone.gates.layer2-0-conv1'].mask
    assert 0 < mask.mean() < 1
    moved = (model.backbone.layer2[0].conv1.weight - start).flatten(1).abs().sum(dim=1)
    assert bool((moved[mask > 0] > 0).all())


def test_a_resumed_run_keeps_its_channels(make_runner, toy, tmp_path):
    common = dict(
        train_cfg=dict(by_epoch=True, max_epochs=2),
        default_hooks=dict(
            logger=dict(type='LoggerHook'), checkpoint=dict(type='CheckpointHook', interval=1)
        ),
    )
    hooks = [dict(type='StaticPruningHook', criterion='random', target=0.6), Masks()]
    make_runner(hooks, model=toy.task(dict(toy.backbone, gate=STATIC)), **common).train()
    again = Masks()
    hooks = [dict(type='StaticPruningHook', criterion='random', target=0.6, seed=1), again]
    other = toy.task(dict(toy.backbone, gate=STATIC))
    start = dict(load_from=str(tmp_path / 'epoch_1.pth'), resume=True)
    make_runner(hooks, model=other, **start, **common).train()
    saved = torch.load(tmp_path / 'epoch_1.pth', weights_only=False)['state_dict']
    masks = torch.cat([value for name, value in saved.items() if name.endswith('.mask')])
    assert len(again.seen) == 3 and 0 < masks.mean() < 1
    assert all(torch.equal(each, masks) for each in again.seen)


@pytest.mark.parametrize(
    ('options', 'message'),
    [(dict(criterion='l1'), "criterion='l1' must be in"), (dict(batches=0), 'batches=0 must be 1')],
)
def test_options_out_of_range(options, message, make_runner):
    with pytest.raises(ValueError, match='StaticPruningHook: ' + message):
        make_runner([dict(type='StaticPruningHook', **options)])


def test_other_gates_are_refused(make_runner):
    runner = make_runner([dict(type='StaticPruningHook')])
    with pytest.raises(ValueError, match='StaticPruningHook: ToyTask must have static gates'):
        runner.train()
