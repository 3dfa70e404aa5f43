# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest

from fgc_mm.gates import find_gates
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
