# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Feature-Gate Coupling in a loop without a Runner."""

import copy

import pytest
import torch
import torch.nn.functional as F
from toy_task import ToyImages, ToyTask, clean_up, make_runner, toy  # noqa: F401

from fgc_mm.coupling import Coupling
from fgc_mm.errors import CheckpointError, NonFiniteError
from fgc_mm.gates import find_gates

N = 12
HOW = dict(layers=[-2, -1], k=3, eta=0.1, form='log_sum', seed=2)


def train(model, coupling, start, stop, between=None, lr=0.1):
    images, optimizer = ToyImages().images, torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    for step in range(start, stop):
        torch.manual_seed(5 + step)
        indices = 4 * (step % 3) + torch.arange(4)
        loss = F.cross_entropy(model(images[indices]), indices % 4) + coupling.loss(indices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        coupling.step()
        if between is not None:
            between()


def everything(model, coupling):
    state = dict(model.state_dict(), seen=torch.tensor(coupling.seen))
    for name, layer in coupling.layers.items():
        state[f'{name}.f'], state[f'{name}.g'] = layer.feature_bank.data, layer.gate_bank.data
        state[f'{name}.turnover'] = coupling.meters[name].last
    return {name: value.clone() for name, value in state.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_it_is_what_the_hook_does(make_runner, toy):  # noqa: F811
    class Numbered(ToyImages):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            item['data_samples'].set_metainfo(dict(instance_idx=index))
            return item

    probe = toy.probe(seed=5)
    hook = dict(type='FGCHook', num_instances=N, warmup_epochs=0.5, **HOW)
    loader = dict(batch_size=4, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False))
    runner = make_runner(
        [hook, probe],
        train_cfg=dict(by_epoch=True, max_epochs=2),
        train_dataloader=dict(dataset=Numbered(), **loader),
    )
    runner.train()
    theirs = next(h for h in runner.hooks if hasattr(h, 'coupling')).coupling

    model = probe.start
    coupling = Coupling(model, N, warmup_epochs=0.5, **HOW)
    start = everything(model, coupling)
    train(model, coupling, 0, 6)
    assert_same(everything(model, coupling), everything(runner.model, theirs))
    assert not any(
        torch.equal(everything(model, coupling)[n], start[n]) for n in start if '.g' in n[-2:]
    )
    assert coupling.epochs == 2.0
    assert set(coupling.overlap()) == set(coupling.turnover()) == set(coupling.layers)


def test_it_goes_on_where_it_was(tmp_path):
    model = ToyTask()
    coupling = Coupling(model, N, **HOW)
    train(model, coupling, 0, 3)
    torch.save((model.state_dict(), coupling.state_dict()), tmp_path / 'state.pth')
    train(model, coupling, 3, 6)

    other = ToyTask()
    resumed = Coupling(other, N, **{**HOW, 'seed': 7})
    weights, state = torch.load(tmp_path / 'state.pth', weights_only=True)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(other, resumed, 3, 6)
    assert_same(everything(model, coupling), everything(other, resumed))

    for wrong, message in (
        (Coupling(ToyTask(), 13, **HOW), 'training set of 12 instances, this one has 13'),
        (Coupling(ToyTask(), N, **{**HOW, 'layers': [-1]}), 'banks of the gates .* coupled are'),
    ):
        with pytest.raises(CheckpointError, match=message):
            wrong.load_state_dict(state)


def test_evaluation_leaves_everything_as_it_is():
    ends = []
    for looks in (False, True):
        torch.manual_seed(0)
        model = ToyTask()
        coupling = Coupling(model, N, **HOW)

        def look(model=model, coupling=coupling):
            before = everything(model, coupling)
            model.eval()
            with torch.no_grad():
                model(torch.rand(2, 3, 32, 32))
                assert coupling.loss(torch.tensor([900, 901])) == 0
                coupling.step()
            assert_same(everything(model, coupling), before)
            model.train()

        train(model, coupling, 0, 4, between=look if looks else None)
        ends.append(everything(model, coupling))
    assert_same(*ends)


def test_a_step_that_is_not_taken_leaves_nothing():
    model = ToyTask().train()
    coupling = Coupling(model, N, **HOW)
    before = everything(model, coupling)
    model(ToyImages().images[:4])
    assert coupling.loss(torch.arange(4)) > 0
    coupling.discard()
    coupling.step()
    after = everything(model, coupling)
    assert all(
        torch.equal(after[name], before[name]) for name in before if name[-2:] in ('.f', '.g')
    )


def test_labels_are_told_with_the_batch_or_before():
    model, images = ToyTask().train(), ToyImages().images
    learned = Coupling(model, N, **{**HOW, 'source': 'label'})
    model(images[:4])
    with pytest.raises(ValueError, match="source='label' needs labels: loss"):
        learned.loss(torch.arange(4))
    for start in (0, 4, 8):
        indices = start + torch.arange(4)
        model(images[indices])
        learned.loss(indices, indices % 4).backward()
        learned.step()
    assert not learned.needs_labels
    known = Coupling(model, N, labels=torch.arange(N) % 4, **{**HOW, 'source': 'label'})
    model(images[:4])
    assert known.loss(torch.arange(4)) > 0


def test_mistakes_and_numbers_that_are_none():
    model, images = ToyTask().train(), ToyImages().images.clone()
    coupling = Coupling(model, N, **HOW)
    with pytest.raises(RuntimeError, match='none of the 2 gates ran'):
        coupling.loss(torch.arange(4))
    model(images[:4])
    with pytest.raises(ValueError, match='saw 4 pictures but the batch has 3 data samples'):
        coupling.loss(torch.arange(3))
    with pytest.raises(IndexError, match='instance index 12 is out of range'):
        coupling.loss(torch.arange(9, 13))
    with pytest.raises(ValueError, match='indices must be a vector of integers'):
        coupling.loss(torch.rand(4))
    model.backbone.norm_eval = True
    model.train()
    images[2] = torch.nan
    model(images[:4])
    with pytest.raises(NonFiniteError, match=r'NaN or Inf for 1 of 4 instances .* instance 6;'):
        coupling.loss(torch.arange(4, 8))
    with pytest.raises(ValueError, match='k=12 neighbors: among N=12'):
        Coupling(model, N, k=12)
    with pytest.raises(ValueError, match="Coupling has no argument 'taus'; did you mean 'tau'"):
        Coupling(model, N, taus=0.1)
    model.backbone.layer4[1] = torch.nn.Identity()
    model(images[4:8])
    with pytest.raises(ValueError, match='layer4-1-conv1 did not run in this pass'):
        coupling.loss(torch.arange(4))


def test_closed_it_is_no_longer_there():
    model = ToyTask()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    copied = copy.deepcopy(model)
    Coupling(model, N, **HOW).close()
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert find_gates(copied).keys() == find_gates(model).keys()
