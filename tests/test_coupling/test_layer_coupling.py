# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import io
import math

import pytest
import torch

from fgc_mm.coupling import LayerCoupling

N, DIM, K = 120, 8, 6


def batch(size=16, seed=0, dim=DIM, count=N):
    generator = torch.Generator().manual_seed(seed)
    feature = torch.rand(size, dim, generator=generator)
    logits = torch.randn(size, dim, generator=generator)
    indices = torch.randperm(count, generator=generator)[:size]
    return feature, logits, indices


def literal_step(v_f, v_g, feature, logits, indices, k, form, tau=0.07, m=0.5, warmup=False):
    """The five steps of the method for distinct instances, dense and in float64."""
    v_f, v_g = v_f.double().clone(), v_g.double().clone()
    a = logits.double().requires_grad_()
    z = feature.double() / feature.double().norm(dim=1, keepdim=True)
    s = z @ v_f.T
    s[torch.arange(len(z)), indices] = -math.inf
    neighbors = s.topk(k, 1).indices
    mixed = m * v_f[indices] + (1 - m) * z
    v_f[indices] = mixed / mixed.norm(dim=1, keepdim=True)
    log_p = torch.log_softmax(a @ v_g.T / tau, 1)
    if warmup:
        loss = -log_p.gather(1, indices[:, None])[:, 0]
    elif form == 'log_sum':
        positives = torch.cat((indices[:, None], neighbors), 1)
        loss = -torch.logsumexp(log_p.gather(1, positives), 1)
    else:
        loss = -log_p.gather(1, neighbors).sum(1) / (k if form == 'mean_log' else 1)
    loss = loss.mean()
    (gradient,) = torch.autograd.grad(loss, a)
    mixed = m * v_g[indices] + (1 - m) * a.detach()
    v_g[indices] = mixed / mixed.norm(dim=1, keepdim=True)
    return loss.detach(), gradient, neighbors, v_f, v_g


@pytest.mark.parametrize('warmup', [False, True])
@pytest.mark.parametrize('form', ['sum_log', 'mean_log', 'log_sum'])
def test_three_steps_of_the_method(form, warmup):
    coupling = LayerCoupling(N, DIM, k=K, form=form, seed=2)
    v_f, v_g = coupling.feature_bank.data, coupling.gate_bank.data
    assert not torch.equal(v_f, v_g)
    for step in range(3):
        feature, logits, indices = batch(seed=step)
        loss, gradient, neighbors, v_f, v_g = literal_step(
            v_f, v_g, feature, logits, indices, K, form, warmup=warmup
        )
        logits.requires_grad_()
        out = coupling.step(feature, logits, indices, warmup=warmup)
        out.loss.backward()
        assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5)
        assert (logits.grad - gradient).norm() <= 1e-5 * gradient.norm()
        if warmup:
            assert out.neighbors is None
        else:
            assert torch.equal(out.neighbors, neighbors)
        assert torch.allclose(coupling.feature_bank.data.double(), v_f, atol=1e-6)
        assert torch.allclose(coupling.gate_bank.data.double(), v_g, atol=1e-6)


def test_loss_leaves_the_banks_alone_and_update_moves_both():
    coupling = LayerCoupling(N, DIM, k=K)
    feature, logits, indices = batch()
    banks = [bank.data.clone() for bank in (coupling.feature_bank, coupling.gate_bank)]
    first = coupling.loss(feature, logits, indices)
    assert torch.equal(coupling.feature_bank.data, banks[0])
    assert torch.equal(coupling.gate_bank.data, banks[1])
    assert torch.equal(coupling.loss(feature, logits, indices).loss, first.loss)
    coupling.update(feature, logits, indices)
    for bank, before in zip((coupling.feature_bank, coupling.gate_bank), banks, strict=True):
        changed = (bank.data != before).any(dim=1).nonzero()[:, 0]
        assert torch.equal(changed, indices.sort().values)


def test_gradient_reaches_the_logits_only():
    coupling = LayerCoupling(N, DIM, k=K)
    feature, logits, indices = batch()
    feature.requires_grad_()
    logits.requires_grad_()
    coupling.step(feature, logits, indices).loss.backward()
    assert feature.grad is None and logits.grad.abs().sum() > 0


def test_space_probs():
    coupling = LayerCoupling(N, DIM, k=K, form='mean_log', space='probs')
    before = coupling.gate_bank.data.double().clone()
    feature, logits, indices = batch()
    logits.requires_grad_()
    out = coupling.step(feature, logits, indices)
    out.loss.backward()
    a = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(torch.sigmoid(a) @ before.T / 0.07, 1)
    loss = -log_p.gather(1, out.neighbors).mean(1).mean()
    (gradient,) = torch.autograd.grad(loss, a)
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert (logits.grad - gradient).norm() <= 1e-5 * gradient.norm()
    mixed = 0.5 * before[indices] + 0.5 * torch.sigmoid(a.detach())
    expected = mixed / mixed.norm(dim=1, keepdim=True)
    assert torch.allclose(coupling.gate_bank.data[indices].double(), expected, atol=1e-6)


def test_the_authors_feature_update():
    coupling = LayerCoupling(N, DIM, k=K, normalize_feature=False)
    before = coupling.feature_bank.data.clone()
    feature, logits, indices = batch()
    coupling.step(10 * feature, logits, indices)
    mixed = 0.5 * before[indices] + 5 * feature
    expected = mixed / mixed.norm(dim=1, keepdim=True)
    assert torch.allclose(coupling.feature_bank.data[indices], expected, atol=1e-6)


def test_source_gate_searches_the_gate_bank():
    coupling = LayerCoupling(N, DIM, k=K, source='gate')
    feature, logits, indices = batch()
    similarity = logits @ coupling.gate_bank.data.T
    similarity[torch.arange(16), indices] = -math.inf
    out = coupling.step(feature, logits, indices)
    assert torch.equal(out.neighbors, similarity.topk(K, 1).indices)


def test_source_label():
    labels = torch.arange(N) % 5
    feature, logits, indices = batch()
    learned = LayerCoupling(N, DIM, k=K, source='label')
    with pytest.raises(ValueError, match="source='label': no label was given for instance"):
        learned.step(feature, logits, indices)
    out = learned.step(feature, logits, indices, labels=labels[indices])
    known = out.neighbors[out.neighbors >= 0]
    assert set(known.tolist()) <= set(indices.tolist())
    assert math.isfinite(out.loss.item())

    given = LayerCoupling(N, DIM, k=K, source='label', labels=labels)
    out = given.step(feature, logits, indices)
    assert (labels[out.neighbors] == labels[indices][:, None]).all()
    assert not (out.neighbors == indices[:, None]).any()


def test_shared_neighbors_come_from_outside():
    last, other = (LayerCoupling(N, DIM, k=K, seed=s) for s in (0, 1))
    feature, logits, indices = batch()
    found = last.step(feature, logits, indices).neighbors
    shared = other.loss(feature, logits, indices, neighbors=found)
    own = other.loss(feature, logits, indices)
    assert torch.equal(shared.neighbors, found)
    assert shared.loss != own.loss


def test_two_ranks_are_one_process():
    """Each rank has half of every batch, the last one uneven, with repeats."""
    one = LayerCoupling(N, DIM, k=K, seed=5)
    ranks = [LayerCoupling(N, DIM, k=K, seed=5) for _ in range(2)]
    for step in range(6):
        feature, logits, indices = batch(seed=step)
        indices[3] = indices[12]  # the same instance on both ranks
        cut = 8 if step < 5 else 13
        parts = [slice(0, cut), slice(cut, None)]
        whole = one.step(feature, logits, indices)
        sums = 0.0
        for rank, part in zip(ranks, parts, strict=True):
            out = rank.loss(feature[part], logits[part], indices[part])
            assert torch.equal(out.neighbors, whole.neighbors[part])
            sums += out.loss.item() * len(indices[part])
        assert sums / 16 == pytest.approx(whole.loss.item(), rel=1e-6)
        for rank in ranks:
            rank.update(feature, logits, indices)
    for name in ('feature_bank', 'gate_bank'):
        expected = getattr(one, name).data
        assert all(torch.equal(getattr(rank, name).data, expected) for rank in ranks)


@pytest.mark.parametrize('kwargs', [{}, dict(source='label'), dict(approximate=dict(dims=4))])
def test_resumed_is_not_interrupted(kwargs):
    def run(coupling, steps):
        out = None
        for step in steps:
            feature, logits, indices = batch(seed=step)
            out = coupling.step(feature, logits, indices, labels=indices % 3)
        return out

    straight = LayerCoupling(N, DIM, k=K, **kwargs)
    run(straight, range(3))
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    resumed = LayerCoupling(N, DIM, k=K, **{**kwargs, 'seed': 0})
    resumed.load_state_dict(torch.load(file, weights_only=True))
    a, b = (run(each, range(3, 6)) for each in (straight, resumed))
    assert torch.equal(a.neighbors, b.neighbors) and torch.equal(a.loss, b.loss)
    assert torch.equal(straight.gate_bank.data, resumed.gate_bank.data)
    assert torch.equal(straight.feature_bank.data, resumed.feature_bank.data)


def test_state_of_another_layer_is_refused_whole():
    coupling = LayerCoupling(N, DIM, k=K)
    before = coupling.feature_bank.data.clone()
    state = LayerCoupling(N, DIM, k=K, seed=1).state_dict()
    state['gate'] = LayerCoupling(N, DIM + 1, k=K).gate_bank.state_dict()
    with pytest.raises(ValueError, match=r'gate bank: .*dim is 9 there and 8 here'):
        coupling.load_state_dict(state)
    assert torch.equal(coupling.feature_bank.data, before)


def test_the_gradient_is_that_of_the_loss():
    """In the logits, through the sigmoid, and for half precision."""
    for space in ('logits', 'probs'):
        coupling = LayerCoupling(N, DIM, k=K, space=space)
        feature, logits, indices = batch()
        logits = logits.detach().double().requires_grad_()
        coupling.loss(feature, logits, indices).loss.backward()
        step = 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).double()
        up, down = (
            coupling.loss(feature, logits.detach() + way * step, indices).value for way in (1, -1)
        )
        assert float((logits.grad * step).sum() * 2) == pytest.approx(float(up - down), rel=1e-4)
        half = logits.detach().bfloat16().requires_grad_()
        result = coupling.loss(feature, half, indices)
        (2.0**-30 * result.loss).backward()  # scaled in float32, rounded once
        torch.testing.assert_close(half.grad, (2.0**-30 * result.gradient).bfloat16())


def test_bad_arguments():
    for kwargs, word in (
        (dict(k=N), f'k={N} .*choose k from 1 to {N - 1}'),
        (dict(form='eq8'), "form='eq8'"),
        (dict(source='magic'), "source='magic'"),
        (dict(space='masks'), "space='masks'"),
        (dict(tau=-1), 'tau=-1'),
    ):
        with pytest.raises(ValueError, match=word):
            LayerCoupling(N, DIM, **{'k': K, **kwargs})
    coupling = LayerCoupling(N, DIM, k=K)
    feature, logits, indices = batch()
    with pytest.raises(IndexError, match=f'{N} is out of range .*N={N}'):
        coupling.step(feature, logits, indices.clone().fill_(N))
    with pytest.raises(ValueError, match=r'feature: .*shape'):
        coupling.step(feature[:, :3], logits, indices)


@pytest.mark.parametrize('storage', ['device', 'host', 'mmap'])
@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_banks_of_all_kinds(storage, dtype, tmp_path):
    kwargs = dict(mmap_dir=str(tmp_path)) if storage == 'mmap' else {}
    coupling = LayerCoupling(N, DIM, k=K, bank_storage=storage, bank_dtype=dtype, **kwargs)
    plain = LayerCoupling(N, DIM, k=K)
    for step in range(3):
        feature, logits, indices = batch(seed=step)
        out, expected = (c.step(feature, logits, indices).loss for c in (coupling, plain))
        assert out.item() == pytest.approx(expected.item(), rel=1e-6 if dtype == 'float32' else 0.1)
    if storage == 'mmap':
        assert {p.name for p in tmp_path.iterdir()} == {'feature.bank', 'gate.bank'}


def test_under_autocast():
    results = []
    for enabled in (False, True):
        coupling = LayerCoupling(N, DIM, k=K)
        for step in range(2):
            feature, logits, indices = batch(seed=step)
            with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
                results.append(coupling.step(feature, logits.requires_grad_(), indices).loss)
    assert torch.equal(torch.stack(results[:2]), torch.stack(results[2:]))


def test_training_on_the_loss_raises_the_overlap():
    """Free gate vectors, coupled to fixed features in four clusters."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 4
    feature = torch.eye(4)[labels].repeat(1, 2) + 0.1 * torch.rand(200, 8, generator=generator)
    gates = torch.randn(200, 8, generator=generator, requires_grad=True)
    coupling = LayerCoupling(200, 8, k=20, form='mean_log')
    optimizer = torch.optim.SGD([gates], lr=5.0)
    overlap = []
    for _ in range(30):
        loss = coupling.step(feature, gates, torch.arange(200)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        overlap.append(coupling.overlap(k=20))
    # Chance is 20 / 199; within a cluster the order of neighbors is noise.
    assert overlap[0] < 0.15 and overlap[-1] > 0.6


def test_no_graph_survives_a_step():
    coupling = LayerCoupling(N, DIM, k=K)
    feature, logits, indices = batch()
    coupling.step(feature, logits.requires_grad_(), indices)
    assert not coupling.gate_bank.data.requires_grad and coupling.gate_bank.data.grad_fn is None
