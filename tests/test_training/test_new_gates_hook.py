# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from fgc_mm.errors import CheckpointError
from fgc_mm.gates import find_gates
from fgc_mm.training import new_gates_hook
from fgc_mm.training.new_gates_hook import NewGatesHook


@pytest.mark.parametrize(
    ('hooks', 'gate', 'frozen', 'said'),
    [
        ([], dict(type='BinConcreteGate'), False, 1),
        ([dict(type='L0Hook')], dict(type='BinConcreteGate'), False, 0),
        ([], dict(type='BinConcreteGate'), True, 0),
        ([], dict(type='FBSGate'), False, 0),
        ([], dict(type='StaticGate'), False, 0),
        ([], None, False, 0),
    ],
)
def test_gates_that_no_loss_is_about_are_told(
    hooks, gate, frozen, said, make_runner, toy, monkeypatch
):
    model = toy.task(dict(toy.backbone, gate=gate))
    for each in find_gates(model).values() if frozen else ():
        each.requires_grad_(False)
    runner = make_runner([*hooks, NewGatesHook()], model=model)
    lines = []
    monkeypatch.setattr(runner.logger, 'warning', lambda text, *_: lines.append(text))
    runner.train()
    lines = [line for line in lines if 'no hook adds a loss on the 8 gates' in line]
    assert len(lines) == said
    assert all('backbone.gates.layer1-0-conv1' in x and 'BudgetHook' in x for x in lines)


def test_load_from_counts_new_gates(gated_and_dense, monkeypatch):
    """In place of a list of every key of every gate."""
    gated, dense = gated_and_dense
    checkpoint, said = {'state_dict': dict(dense.state_dict())}, []
    monkeypatch.setattr(new_gates_hook, 'print_log', lambda text, **_: said.append(text))
    NewGatesHook().after_load_checkpoint(SimpleNamespace(model=gated), checkpoint)
    assert said == ['load_from: 56 keys of 8 gates are new, not in the checkpoint']
    assert set(checkpoint['state_dict']) == set(gated.state_dict())
    before = {k: v.clone() for k, v in gated.state_dict().items() if 'gate' in k}
    gated.load_state_dict(checkpoint['state_dict'])
    assert all(torch.equal(gated.state_dict()[k], v) for k, v in before.items())


def test_load_from_of_another_network_is_refused(gated_and_dense):
    gated, dense = gated_and_dense
    backbone = {f'module.{key}': value for key, value in dense.backbone.state_dict().items()}
    with pytest.raises(CheckpointError, match='no weight of the ImageClassifier'):
        NewGatesHook().after_load_checkpoint(SimpleNamespace(model=gated), {'state_dict': backbone})


@pytest.fixture
def gated_and_dense():
    cfg = Config.fromfile('configs/resnet18_gated_imagenet.py')
    init_default_scope('mmpretrain')
    cfg.model.backbone.update(base_channels=8, stem_channels=8)
    cfg.model.head.in_channels = 64
    gated = MODELS.build(cfg.model)
    cfg.model.backbone.gate = None
    return gated, MODELS.build(cfg.model)
