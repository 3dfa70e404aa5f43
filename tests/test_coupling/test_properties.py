# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Bank, neighbors and contrast on whatever comes, against literal dense computations."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fgc_mm.coupling import LabelSource, LayerCoupling, MemoryBank
from fgc_mm.coupling import nearest_neighbors as search
from fgc_mm.coupling.contrast import contrast_and_gradient

quick = settings(max_examples=60, deadline=None, derandomize=True)
NOT_FINITE = [math.nan, math.inf, -math.inf]
# Exact in half precision, so that ties are ties, with zeros and duplicates in plenty.
whole = st.integers(-3, 3)
extreme = st.sampled_from([0.0, 1.0, -1.0, 1e-30, -1e-30, 3e37, -3e37, 0.5, 65504.0, *NOT_FINITE])


def rows(values, count, width):
    """Matrices, drawn as lists."""
    row = st.lists(values, min_size=width, max_size=width)
    return st.lists(row, min_size=count, max_size=count)


def matrix(drawn, width, dtype=torch.float32):
    return torch.tensor(drawn, dtype=dtype).reshape(len(drawn), width)


def literal_bank(data, indices, vectors, momentum, normalize):
    """One instance after the other, in float64 and plain Python."""
    data = data.double().clone()
    for index, vector in zip(indices, vectors.double(), strict=True):
        length = vector.norm()
        if not length:
            continue
        mixed = momentum * data[index] + (1 - momentum) * (vector / length if normalize else vector)
        if mixed.norm():
            data[index] = mixed / mixed.norm()
    return data


@quick
@given(
    draw=st.data(),
    size=st.integers(1, 6),
    width=st.integers(1, 4),
    batch=st.integers(0, 7),
    dtype=st.sampled_from(['float32', 'float16']),
    given_as=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    number=st.sampled_from([torch.int64, torch.int32, torch.uint8]),
    momentum=st.sampled_from([0.0, 0.5, 0.99]),
    normalize=st.booleans(),
)
def test_bank(draw, size, width, batch, dtype, given_as, number, momentum, normalize):
    indices = draw.draw(st.lists(st.integers(0, size - 1), min_size=batch, max_size=batch))
    vectors = matrix(draw.draw(rows(extreme, batch, width)), width, given_as)
    bank = MemoryBank(size, width, dtype, momentum=momentum, normalize_input=normalize)
    before = bank.data.clone()
    where = torch.tensor(indices, dtype=number)
    assume(bool(torch.isfinite(vectors.float()).all()))
    bank.update(where, vectors)
    assert bank.data.dtype == before.dtype and bank.data.shape == before.shape
    untouched = [i for i in range(size) if i not in indices]
    assert torch.equal(bank.data[untouched], before[untouched])
    lengths = bank.data.float().norm(dim=1)
    assert torch.allclose(lengths, torch.ones(size), atol=5e-3 if dtype == 'float16' else 1e-5)
    # Where a row nearly cancels, rounding decides about its direction; and the
    # repeated rows of a half bank are rounded in between.
    if len(set(indices)) == len(indices):
        expected = literal_bank(before, indices, vectors.float(), momentum, normalize)
        mixed = momentum * before.double()[indices] + (1 - momentum) * vectors.double()
        assume(normalize or bool((mixed.norm(dim=1) > 1e-2).all()))
        close = torch.allclose(bank.data.double(), expected, atol=2e-3)
        assert close, (bank.data, expected)


@quick
@given(
    draw=st.data(),
    size=st.integers(2, 9),
    width=st.integers(1, 4),
    batch=st.integers(0, 4),
    backend=st.sampled_from(['torch', 'faiss']),
    half=st.booleans(),
    exclude=st.booleans(),
)
def test_neighbors(draw, size, width, batch, backend, half, exclude):
    if backend == 'faiss':
        pytest.importorskip('faiss')
    data = matrix(draw.draw(rows(whole, size, width)), width)
    queries = matrix(draw.draw(rows(whole, batch, width)), width)
    k = draw.draw(st.integers(1, size - 1))
    own = draw.draw(st.lists(st.integers(-1, size - 1), min_size=batch, max_size=batch))
    found, similarity = search(
        queries,
        data.half() if half else data,
        k,
        torch.tensor(own, dtype=torch.int64) if exclude else None,
        backend,
    )
    assert found.dtype == torch.int64 and similarity.dtype == torch.float32
    assert found.shape == similarity.shape == (batch, k)
    for b in range(batch):
        products = [
            sum(x * y for x, y in zip(q, queries[b].tolist(), strict=True)) for q in data.tolist()
        ]
        rest = [j for j in range(size) if not exclude or j != own[b]]
        best = sorted(rest, key=lambda j, products=products: (-products[j], j))[:k]
        assert found[b].tolist() == best
        assert similarity[b].tolist() == [products[j] for j in best]


def dense_contrast(queries, bank, positives, form, tau):
    """The whole softmax in float64, instance by instance."""
    losses = []
    for query, own in zip(queries, positives.tolist(), strict=True):
        logs = torch.log_softmax(bank @ query / tau, dim=0)
        chosen = [logs[j] for j in own if j >= 0]
        if not chosen:
            losses.append(query.sum() * 0)
        elif form == 'log_sum':
            losses.append(-torch.logsumexp(torch.stack(chosen), dim=0))
        else:
            total = -sum(chosen)
            losses.append(total / len(chosen) if form == 'mean_log' else total)
    return torch.stack(losses) if losses else queries.sum(dim=1)


@quick
@given(
    draw=st.data(),
    size=st.integers(1, 7),
    width=st.integers(1, 4),
    batch=st.integers(0, 4),
    count=st.integers(0, 5),
    form=st.sampled_from(['sum_log', 'mean_log', 'log_sum']),
    tau=st.sampled_from([0.07, 1.0, 30.0]),
    given_as=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_contrast(draw, size, width, batch, count, form, tau, given_as):
    bank = matrix(draw.draw(rows(whole, size, width)), width) / 4
    queries = matrix(draw.draw(rows(whole, batch, width)), width, given_as)
    rest = st.integers(-1, size - 1)  # -1 for none; what is listed twice counts twice
    positives = matrix(draw.draw(rows(rest, batch, count)), count, torch.int64)
    loss, gradient = contrast_and_gradient(queries, bank, positives, form, tau)
    exact = queries.double().requires_grad_()
    expected = dense_contrast(exact, bank.double(), positives, form, tau)
    assert loss.dtype == (torch.float64 if given_as == torch.float64 else torch.float32)
    assert loss.shape == expected.shape and gradient.shape == queries.shape
    assert torch.allclose(loss.double(), expected, rtol=1e-4, atol=1e-4)
    expected.sum().backward()
    assert torch.allclose(gradient.double(), exact.grad, rtol=1e-3, atol=1e-3)


@quick
@given(
    draw=st.data(),
    bad=st.sampled_from(NOT_FINITE),
    batch=st.integers(1, 4),
    form=st.sampled_from(['sum_log', 'mean_log', 'log_sum']),
)
def test_contrast_hides_nothing_that_is_not_finite(draw, bad, batch, form):
    """The loss of that query is none, which FiniteHook sees; those of the others are as ever."""
    bank = matrix(draw.draw(rows(whole, 5, 3)), 3) / 4
    queries = matrix(draw.draw(rows(whole, batch, 3)), 3)
    positives = matrix(draw.draw(rows(st.integers(0, 4), batch, 2)), 2, torch.int64)
    expected = dense_contrast(queries.double(), bank.double(), positives, form, 0.5)
    which = draw.draw(st.integers(0, batch - 1))
    queries[which, draw.draw(st.integers(0, 2))] = bad
    loss = contrast_and_gradient(queries, bank, positives, form, 0.5)[0]
    assert not bool(torch.isfinite(loss[which]))
    others = [number for number in range(batch) if number != which]
    assert torch.allclose(loss[others].double(), expected[others], rtol=1e-4, atol=1e-4)


@quick
@given(
    draw=st.data(),
    size=st.integers(3, 8),
    width=st.integers(1, 4),
    batch=st.integers(0, 5),
    source=st.sampled_from(['feature', 'gate', 'label']),
    form=st.sampled_from(['sum_log', 'mean_log', 'log_sum']),
)
def test_one_step_of_a_layer(draw, size, width, batch, source, form):
    """Empty batches, batches of one, repeated instances, one class: neighbors, loss, banks."""
    numbers = st.integers(0, size - 1)
    indices = torch.tensor(
        draw.draw(st.lists(numbers, min_size=batch, max_size=batch)), dtype=torch.int64
    )
    feature = matrix(draw.draw(rows(whole, batch, width)), width)
    logits = matrix(draw.draw(rows(whole, batch, width)), width).requires_grad_()
    k = draw.draw(st.integers(1, size - 1))
    labels = torch.zeros(size, dtype=torch.int64)  # one class: all others are candidates
    coupling = LayerCoupling(size, width, k=k, form=form, source=source, tau=0.5, labels=labels)
    banks = {
        n: b.data.clone() for n, b in (('f', coupling.feature_bank), ('g', coupling.gate_bank))
    }
    result = coupling.step(feature, logits, indices)
    found = result.neighbors
    assert found.shape == (batch, k)
    for own, near in zip(indices.tolist(), found.tolist(), strict=True):
        assert own not in near and len(set(near)) == k
    own = indices[:, None] if form == 'log_sum' else indices[:, None][:, :0]
    positives = torch.cat((own, found), dim=1)
    expected = dense_contrast(
        logits.detach().double(), banks['g'].double(), positives, form, 0.5
    ).sum() / max(1, batch)
    assert torch.allclose(result.loss.double(), expected, rtol=1e-4, atol=1e-4)
    result.loss.backward()
    assert bool(torch.isfinite(logits.grad).all()) or not batch
    # A gate vector that cancels its row leaves rounding to decide.
    after = literal_bank(banks['f'], indices.tolist(), feature, 0.5, True)
    assert torch.allclose(coupling.feature_bank.data.double(), after, atol=1e-4)


@quick
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    k=st.integers(1, 6),
    draws=st.integers(1, 3),
    draw=st.data(),
)
def test_label_source(labels, k, draws, draw):
    """Against the definition: k others of the class, all of them if there are fewer."""
    source = LabelSource(len(labels), torch.tensor(labels))
    picked = draw.draw(st.lists(st.integers(0, len(labels) - 1), max_size=6))
    for _ in range(draws):
        found = source.draw(torch.tensor(picked, dtype=torch.int64), k)
        assert found.shape == (len(picked), k)
        for own, near in zip(picked, found.tolist(), strict=True):
            others = {j for j, label in enumerate(labels) if label == labels[own]} - {own}
            real = [j for j in near if j >= 0]
            assert set(real) <= others
            assert len(real) == len(set(real)) == min(k, len(others))
            assert near[len(real) :] == [-1] * (k - len(real))
