# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A dense teacher in a loop without a Runner."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fgc_mm
from fgc_mm.errors import CheckpointError, UsageError
from fgc_mm.gates import find_gates
from fgc_mm.sites import Gates
from fgc_mm.training import Distillation


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.more = nn.Conv2d(16, 8, 3)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.more(self.body(self.stem(x).relu())).mean(dim=(2, 3)))


@pytest.fixture
def pictures():
    return torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pair(pictures):
    """A dense network, and the same with gates that close half of the channels."""
    torch.manual_seed(0)
    dense = Net()
    gate = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'), bias_init=0.0)
    return dense, fgc_mm.gate(copy.deepcopy(dense), pictures, gate)


def test_the_loss_is_the_relative_error_of_the_outputs(pair, pictures):
    dense, net = pair
    distillation = Distillation(net, weight=3.0)
    out = net(pictures)
    wanted = dense.eval()(pictures)
    loss = distillation.loss()
    torch.testing.assert_close(loss, 3 * F.mse_loss(out, wanted) / wanted.square().mean())
    loss.backward()
    assert net.stem.weight.grad.abs().sum() > 0
    assert not any(isinstance(module, Gates) for module in distillation.teacher.modules())
    assert len(find_gates(net)) == 2


def test_named_modules_are_compared_each_in_its_own_scale(pair, pictures):
    dense, net = pair
    distillation = Distillation(net, outputs=['body', 'more'], weight=1.0)
    kept = {}
    for owner, where in ((net, 'ours'), (dense.eval(), 'theirs')):
        for name in ('body', 'more'):
            module = owner.get_submodule(name)
            module.register_forward_hook(
                lambda m, i, o, key=(where, name): kept.__setitem__(key, o.detach())
            )
    net(pictures)
    dense(pictures)
    each = [
        F.mse_loss(kept['ours', n], kept['theirs', n]) / kept['theirs', n].square().mean()
        for n in ('body', 'more')
    ]
    torch.testing.assert_close(distillation.loss().detach(), sum(each) / 2)


def test_logits_are_compared_as_classes(pair, pictures):
    dense, net = pair
    distillation = Distillation(net, weight=0.0, kl=2.0, temperature=3.0)
    ours, theirs = net(pictures) / 3, dense.eval()(pictures) / 3
    wanted = F.kl_div(ours.log_softmax(1), theirs.softmax(1), reduction='batchmean')
    torch.testing.assert_close(distillation.loss(), 2 * 9 * wanted)
    with pytest.raises(UsageError, match='kl is for the logits of a classifier'):
        maps = Distillation(net, kl=1.0, logits='more')
        net(pictures)
        maps.loss()


def test_evaluation_costs_nothing(pair, pictures):
    _, net = pair
    distillation = Distillation(net)
    calls = []
    distillation.teacher.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        net(pictures)
    net.eval()(pictures)
    assert not calls
    with pytest.raises(UsageError, match='run the network in training mode'):
        distillation.loss()
    net.train()(pictures)
    assert len(calls) == 1
    distillation.close()
    net(pictures)
    assert len(calls) == 1


def test_half_precision(pair, pictures):
    _, net = pair
    distillation = Distillation(net)
    with torch.autocast('cpu', torch.bfloat16):
        net(pictures)
        loss = distillation.loss()
    assert loss.dtype == torch.float32 and bool(loss.isfinite())


def test_training_draws_the_network_to_its_teacher(pair, pictures):
    _, net = pair
    distillation = Distillation(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(60):
        net(pictures)
        loss = distillation.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_a_file_or_a_network_of_ones_own(pair, pictures, tmp_path):
    _, net = pair
    other = Net()
    torch.save(dict(state_dict={f'module.{k}': v for k, v in other.state_dict().items()}),
               tmp_path / 'other.pth')  # fmt: skip
    from_file = Distillation(net, str(tmp_path / 'other.pth'))
    given = Distillation(net, other)
    assert from_file.token == given.token != Distillation(net).token
    net(pictures)
    torch.testing.assert_close(from_file.loss(), given.loss())


def test_a_state_brings_the_teacher_back(pair, tmp_path):
    _, net = pair
    first = Distillation(net)
    torch.save(first.state_dict(), tmp_path / 'state.pth')
    with torch.no_grad():
        net.more.weight.add_(1)
    later = Distillation(net)
    assert later.token != first.token
    state = torch.load(tmp_path / 'state.pth', weights_only=True)
    later.load_state_dict(state)
    assert later.token == first.token
    state['weights']['more.weight'][0] += 1
    with pytest.raises(CheckpointError, match='is not the one it says it is'):
        later.load_state_dict(state)


def test_what_cannot_be(pair, tmp_path):
    _, net = pair
    torch.save(dict(state_dict=nn.Linear(3, 3).state_dict()), tmp_path / 'linear.pth')
    (tmp_path / 'text.pth').write_text('no checkpoint')
    for options, error, message in (
        (dict(weight=-1), UsageError, 'weight=-1 must be 0 or more'),
        (dict(weight=0), UsageError, 'weight=0 and kl=0'),
        (dict(kl=1, temperature=0), UsageError, 'temperature=0 must be positive'),
        (dict(outputs=['layer9']), UsageError, "outputs: Net has no part 'layer9'; it has 'stem'"),
        (dict(backbone='body2'), UsageError, "Net has no part 'body2'"),
        (dict(teacher=str(tmp_path / 'no.pth')), CheckpointError, "no.pth' does not exist"),
        (dict(teacher=str(tmp_path / 'text.pth')), CheckpointError, 'cannot be read as a'),
        (
            dict(teacher=str(tmp_path / 'linear.pth')),
            CheckpointError,
            'does not fit the Net that is taught: 12 of its 13 weights are missing',
        ),
    ):
        with pytest.raises(error, match=message):
            Distillation(net, **options)
