# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import importlib.util
import logging
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.logging import MMLogger

from fgc_mm.coupling import (
    LabelSource,
    LayerCoupling,
    MemoryBank,
    nearest_neighbors,
    neighbors,
)
from fgc_mm.coupling.memory_bank import unit_rows
from fgc_mm.coupling.topk import _filtered_keys, _plain_keys, pack, topk_rows, unpack

HAS_FAISS = importlib.util.find_spec('faiss') is not None
WITH_FAISS = pytest.mark.skipif(not HAS_FAISS, reason='requires faiss')
BACKENDS = ['torch', pytest.param('faiss', marks=WITH_FAISS)]


def make(batch, size, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bank = unit_rows(torch.randn(size, dim, generator=generator))
    queries = unit_rows(torch.randn(batch, dim, generator=generator))
    own = torch.randint(size, (batch,), generator=generator)
    return queries, bank, own


def integers(batch, size, dim, values=3, seed=0):
    """Vectors of small integers: inner products are exact, with many ties."""
    generator = torch.Generator().manual_seed(seed)
    bank = torch.randint(-values, values + 1, (size, dim), generator=generator).float()
    queries = torch.randint(-values, values + 1, (batch, dim), generator=generator).float()
    own = torch.randint(size, (batch,), generator=generator)
    return queries, bank, own


def literal(queries, bank, k, own=None):
    """A full sort in float64; of equal rows the first one first."""
    similarity = queries.double().numpy() @ bank.double().numpy().T
    if own is not None:
        similarity[np.arange(len(queries)), own.numpy()] = -np.inf
    return torch.from_numpy(np.argsort(-similarity, axis=1, kind='stable')[:, :k])


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('k', [1, 4, 200])
@pytest.mark.parametrize('size', [700, 6001])
def test_exact_and_without_itself(backend, k, size):
    queries, bank, own = make(40, size, 16)
    queries[:20] = bank[own[:20]]  # itself is the nearest; for the others it is far away
    rows, similarity = nearest_neighbors(queries, bank, k, own, backend)
    assert rows.shape == similarity.shape == (40, k)
    assert not (rows == own[:, None]).any()
    expected = literal(queries, bank, k, own)
    exact = (queries.double() @ bank.double().T).gather(1, expected)
    assert torch.allclose(similarity.double(), exact, atol=1e-6)
    # The same rows, except where two similarities differ by rounding only.
    same = rows == expected
    there = (queries.double() @ bank.double().T).gather(1, rows)
    assert (same | ((there - exact).abs() < 1e-6)).all()
    assert same.float().mean() > 0.99


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('size', [300, 5000])
@pytest.mark.parametrize('k', [1, 7, 150])
def test_ties_go_to_the_first_rows(backend, size, k):
    queries, bank, own = integers(30, size, 4)
    rows, _ = nearest_neighbors(queries, bank, k, own, backend)
    assert torch.equal(rows, literal(queries, bank, k, own))


@pytest.mark.parametrize('backend', BACKENDS)
def test_all_rows_equal_or_queries_zero(backend):
    """Everything ties; more than a million pairs pass any threshold."""
    bank = torch.ones(5000, 2)
    queries = torch.ones(300, 2)
    own = torch.arange(300)
    rows, _ = nearest_neighbors(queries, bank, 3, own, backend)
    assert torch.equal(rows, literal(queries, bank, 3, own))
    rows, similarity = nearest_neighbors(queries * 0, bank, 3, own, backend)
    assert torch.equal(rows, literal(queries, bank, 3, own)) and not similarity.any()


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 8),
    size=st.integers(2, 300),
    dim=st.integers(1, 5),
    k=st.integers(1, 299),
    chunk=st.integers(8, 400),
    half=st.booleans(),
    values=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)
def test_every_way_gives_the_same(batch, size, dim, k, chunk, half, values, seed):
    k = min(k, size - 1)
    queries, bank, own = integers(batch, size, dim, values, seed)
    if half:
        bank = bank.half()
    expected = literal(queries, bank, k, own)
    for keys in (_plain_keys, _filtered_keys):
        rows, similarity = unpack(keys(queries, bank, k, own, chunk))
        assert torch.equal(rows, expected), keys.__name__
        assert torch.equal(similarity, (queries @ bank.float().T).gather(1, rows))
    assert torch.equal(nearest_neighbors(queries, bank, k, own, 'torch')[0], expected)
    if HAS_FAISS:
        assert torch.equal(nearest_neighbors(queries, bank, k, own, 'faiss')[0], expected)


def test_a_bad_guess_of_the_threshold_costs_no_exactness():
    """Rows sorted by similarity, and a sample that sees none of the near ones."""
    generator = torch.Generator().manual_seed(0)
    bank = torch.rand(8192, 4, generator=generator) * 0.1
    # The guess looks at every fourth row; the neighbors are elsewhere.
    near = torch.arange(1, 8192, 4)[:600]
    bank[near] += 1
    queries = torch.rand(20, 4, generator=generator) + 0.1
    own = near[:20].clone()
    for data in (bank, bank[bank.sum(1).argsort()], bank[(-bank.sum(1)).argsort()]):
        rows, _ = topk_rows(queries, data, 50, own)
        expected = literal(queries, data, 50, own)
        exact = (queries.double() @ data.double().T).gather(1, expected)
        found = (queries.double() @ data.double().T).gather(1, rows)
        assert torch.allclose(found, exact, atol=1e-6)
        assert (rows == expected).float().mean() > 0.99
    # And the other way round: the sample sees only near ones, few rows pass.
    bank = torch.rand(8192, 4, generator=generator) * 0.1
    bank[::4] += 1
    sample_only = topk_rows(queries, bank, 500, own)[0]
    assert torch.equal(sample_only.sort(1).values, literal(queries, bank, 500, own).sort(1).values)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('storage', ['host', 'mmap'])
@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_banks_of_all_kinds(backend, storage, dtype):
    bank = MemoryBank(5000, 8, dtype=dtype, storage=storage)
    queries, _, own = make(20, 5000, 8)
    rows, similarity = nearest_neighbors(queries, bank.data, 10, own, backend)
    expected = literal(queries, bank.data.float(), 10, own)
    assert (rows == expected).float().mean() > 0.99
    exact = (queries.double() @ bank.data.double().T).gather(1, expected)
    assert torch.allclose(similarity.double(), exact, atol=1e-6)


@pytest.mark.parametrize('backend', BACKENDS)
def test_without_exclusion_and_with_minus_one(backend):
    queries, bank, own = make(10, 500, 8)
    queries[:] = bank[own]
    rows, _ = nearest_neighbors(queries, bank, 3, backend=backend)
    assert torch.equal(rows[:, 0], own)
    none = torch.full_like(own, -1)
    assert torch.equal(nearest_neighbors(queries, bank, 3, none, backend)[0], rows)


@pytest.mark.parametrize('backend', BACKENDS)
def test_all_others_are_neighbors(backend):
    queries, bank, own = make(6, 9, 4)
    rows, _ = nearest_neighbors(queries, bank, 8, own, backend)
    for i in range(6):
        assert sorted(rows[i].tolist() + [int(own[i])]) == list(range(9))


@pytest.mark.parametrize('k', [0, 9, 100])
def test_k_that_does_not_fit(k):
    queries, bank, own = make(6, 9, 4)
    with pytest.raises(ValueError, match=rf'k={k} .*N=9 .*from 1 to 8'):
        nearest_neighbors(queries, bank, k, own)


def test_wrong_width_and_backend():
    queries, bank, own = make(6, 9, 4)
    with pytest.raises(ValueError, match='widths'):
        nearest_neighbors(queries[:, :3], bank, 2, own)
    with pytest.raises(ValueError, match="backend='annoy'"):
        nearest_neighbors(queries, bank, 2, own, 'annoy')
    with pytest.raises(ValueError, match="backend='annoy'"):
        LayerCoupling(9, 4, k=2, backend='annoy')


def test_many_queries_and_autocast():
    queries, bank, own = make(1500, 4500, 4)
    expected = nearest_neighbors(queries, bank, 5, own, 'torch')
    with torch.autocast('cpu', torch.bfloat16):
        rows, similarity = nearest_neighbors(queries, bank, 5, own, 'torch')
    assert torch.equal(rows, expected[0]) and torch.equal(similarity, expected[1])
    assert (rows == literal(queries, bank, 5, own)).float().mean() > 0.99


def test_keys_sort_by_similarity_then_row():
    similarity = torch.tensor([0.5, -0.5, 0.0, -0.0, 0.5, 1e-40, float('-inf')])
    rows = torch.tensor([7, 1, 5, 4, 3, 2**31 + 5, 0])
    keys = pack(similarity, rows)
    order = keys.argsort(descending=True).tolist()
    assert order == [4, 0, 5, 3, 2, 1, 6]
    back, values = unpack(keys)
    assert torch.equal(back, rows) and torch.equal(values, similarity)


@pytest.mark.parametrize('worst', [False, True])
def test_memory_does_not_grow_with_batch_times_bank(largest_tensor, worst):
    """The plain way needs 4 B N bytes per buffer: 16 MB, then 64 MB."""
    largest = []
    for size in (40_000, 160_000):
        queries, bank, own = make(100, size, 4)
        if worst:
            bank[:] = bank[0]
        with largest_tensor() as mode:
            topk_rows(queries, bank, 20, own)
        largest.append(mode.bytes)
    assert max(largest) <= 12 << 20 and largest[1] <= 1.5 * largest[0]


@WITH_FAISS
def test_faiss_reads_the_bank_where_it_lies():
    """No copy: the searched array is the bank's own memory."""
    faiss = importlib.import_module('faiss')
    queries, bank, own = make(6, 900, 8)
    seen = []
    knn = faiss.knn

    def spy(queries, data, *args, **kwargs):
        seen.append(data.__array_interface__['data'][0])
        return knn(queries, data, *args, **kwargs)

    faiss.knn = spy
    try:
        nearest_neighbors(queries, bank, 3, own, 'faiss')
    finally:
        faiss.knn = knn
    assert seen == [bank.data_ptr()]


@pytest.fixture
def notices():
    """Messages of mmengine's logger."""
    handler = logging.Handler()
    messages = []
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_without_faiss(monkeypatch, notices):
    monkeypatch.setitem(sys.modules, 'faiss', None)  # import raises ImportError
    neighbors._faiss.cache_clear()
    neighbors._notice_once.cache_clear()
    queries, bank, own = make(6, 900, 8)
    try:
        for _ in range(3):
            rows, _ = nearest_neighbors(queries, bank, 3, own, 'auto')
        assert torch.equal(rows, literal(queries, bank, 3, own))
        assert len(notices) == 1 and 'faiss is not installed' in notices[0]
        for call in (
            lambda: nearest_neighbors(queries, bank, 3, own, 'faiss'),
            lambda: LayerCoupling(9, 4, k=2, backend='faiss'),
        ):
            with pytest.raises(ImportError, match="backend='faiss' but faiss is not installed"):
                call()
    finally:
        neighbors._faiss.cache_clear()
        neighbors._notice_once.cache_clear()


def test_label_source_draws_the_same_label_without_itself():
    labels = torch.arange(100) % 4
    source = LabelSource(100, labels, seed=1)
    own = torch.tensor([0, 5, 5, 99])
    first = source.draw(own, 10)
    assert (labels[first] == labels[own][:, None]).all()
    assert not (first == own[:, None]).any()
    assert all(len(set(row)) == 10 for row in first.tolist())
    second = source.draw(own, 10)
    assert not torch.equal(first, second)
    again = LabelSource(100, labels, seed=1)
    assert torch.equal(again.draw(own, 10), first)
    # It depends on the instance and the draw, not on the rest of the batch.
    assert torch.equal(again.draw(own[2:], 10), second[2:])
    assert not torch.equal(LabelSource(100, labels, seed=2).draw(own, 10), first)


def test_label_source_is_uniform():
    source = LabelSource(40, torch.arange(40) % 2)
    counts = torch.zeros(40)
    for _ in range(1500):
        counts += torch.bincount(source.draw(torch.tensor([6]), 5)[0], minlength=40)
    others = [i for i in range(0, 40, 2) if i != 6]
    assert counts.sum() == counts[others].sum() == 7500
    expected = 7500 / 19
    assert (counts[others] - expected).abs().max() < 5 * expected**0.5


def test_label_source_with_small_and_unknown_classes():
    source = LabelSource(10)
    with pytest.raises(ValueError, match='no label was given for instance 3'):
        source.draw(torch.tensor([3]), 2)
    source.observe(torch.tensor([3, 4, 7, 8]), torch.tensor([1, 1, 1, 5]))
    rows = source.draw(torch.tensor([3, 8, 7]), 4)
    assert sorted(rows[0].tolist()) == [-1, -1, 4, 7]
    assert rows[1].tolist() == [-1] * 4
    assert sorted(rows[2].tolist()) == [-1, -1, 3, 4]


def test_label_source_refuses_what_is_no_label():
    source = LabelSource(10)
    with pytest.raises(ValueError, match='float32'):
        source.observe(torch.arange(2), torch.rand(2))
    with pytest.raises(ValueError, match='one integer label per instance'):
        source.observe(torch.arange(2), torch.zeros(2, 3).long())
    with pytest.raises(ValueError, match='-1 is negative'):
        source.observe(torch.arange(2), torch.tensor([0, -1]))


def test_label_source_state():
    source = LabelSource(50, torch.arange(50) % 3)
    own = torch.arange(6)
    source.draw(own, 4)
    other = LabelSource(50)
    other.load_state_dict(source.state_dict())
    assert torch.equal(source.draw(own, 4), other.draw(own, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason='requires CUDA')
@pytest.mark.parametrize('backend', ['torch', 'faiss', 'auto'])
@pytest.mark.parametrize('bank_device', ['cuda', 'cpu'])
def test_on_a_gpu(backend, bank_device):
    queries, bank, own = integers(30, 5000, 4)
    rows, _ = nearest_neighbors(queries.cuda(), bank.to(bank_device), 20, own.cuda(), backend)
    assert torch.equal(rows.cpu(), literal(queries, bank, 20, own))
