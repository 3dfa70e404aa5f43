# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest
import torch

from fgc_mm.coupling import ApproximateSearch, LayerCoupling, MemoryBank, nearest_neighbors
from fgc_mm.coupling.memory_bank import unit_rows


def low_rank_bank(size=3000, dim=64, rank=12, seed=0, **kwargs):
    """Rows that vary in a few directions, with some noise, as features do."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(size, rank, generator=generator) @ torch.randn(
        rank, dim, generator=generator
    )
    rows = unit_rows(rows + 0.3 * torch.randn(size, dim, generator=generator))
    bank = MemoryBank(size, dim, momentum=0.0, **kwargs)
    bank.update(torch.arange(size), rows)
    return bank


def recall_of(found, exact):
    hits = sum(len(set(a) & set(b)) for a, b in zip(found.tolist(), exact.tolist(), strict=True))
    return hits / exact.numel()


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('storage', ['device', 'mmap'])
def test_finds_nearly_all_and_states_how_many(dtype, storage):
    bank = low_rank_bank(dtype=dtype, storage=storage)
    own = torch.arange(0, 3000, 100)
    queries = bank.data[own].float()
    search = ApproximateSearch(bank, dims=16, oversample=4, recall_queries=30)
    assert search.recall is None
    rows, similarity = search.search(queries, 20, own)
    exact, exact_similarity = nearest_neighbors(queries, bank.data, 20, own)
    assert search.recall == pytest.approx(recall_of(rows, exact))
    assert search.recall > 0.95
    assert not (rows == own[:, None]).any()
    # What is found has its exact similarity, in order.
    expected = (queries.double() @ bank.data.double().T).gather(1, rows)
    assert torch.allclose(similarity.double(), expected, atol=1e-6)
    assert (similarity[:, 1:] <= similarity[:, :-1]).all()
    assert (similarity <= exact_similarity + 1e-6).all()


def test_recall_is_low_where_the_method_does_not_fit():
    """An isotropic bank has no principal directions: the figure must say so."""
    bank = MemoryBank(3000, 64)
    own = torch.arange(20)
    search = ApproximateSearch(bank, dims=4, oversample=2)
    rows, _ = search.search(unit_rows(torch.rand(20, 64)), 10, own)
    assert search.recall is not None and search.recall < 0.5
    assert rows.shape == (20, 10)


def test_with_all_rows_as_candidates_it_is_exact():
    bank = low_rank_bank(size=200)
    own = torch.arange(50)
    search = ApproximateSearch(bank, dims=2, oversample=20)
    rows, _ = search.search(bank.data[own], 10, own)
    assert torch.equal(rows, nearest_neighbors(bank.data[own], bank.data, 10, own)[0])
    assert search.recall == 1.0


def test_the_sketch_follows_updates():
    bank = low_rank_bank(size=2000)
    own = torch.arange(10)
    queries = bank.data[own].clone()
    search = ApproximateSearch(bank, dims=16, oversample=2)
    search.search(queries, 5, own)
    # Rows that were far away become copies of the first query.
    moved = torch.arange(1000, 1005)
    assert not set(moved.tolist()) & set(search.search(queries, 5, own)[0][0].tolist())
    bank.update(moved.repeat(2), queries[:1].expand(10, -1))
    search.rows_changed(moved.repeat(2))
    assert search.search(queries, 5, own)[0][0].sort().values.tolist() == moved.tolist()


def test_directions_are_taken_anew():
    bank = low_rank_bank(seed=0)
    own = torch.arange(40)
    search = ApproximateSearch(bank, dims=12, oversample=2, refresh=2)
    search.search(bank.data[own], 10, own)
    first = search.recall
    bank.update(torch.arange(3000), low_rank_bank(seed=1).data)
    search.rows_changed(torch.arange(3000))
    found = search.search(bank.data[own], 10, own)[0]
    assert search.recall == first  # not due
    stale = recall_of(found, nearest_neighbors(bank.data[own], bank.data, 10, own)[0])
    search.search(bank.data[own], 10, own)
    assert search.recall > stale + 0.2


def test_state_and_autocast():
    bank = low_rank_bank()
    own = torch.arange(40)
    search = ApproximateSearch(bank, dims=12)
    before = search.search(bank.data[own], 10, own)[0]
    other = ApproximateSearch(bank, dims=12)
    other.load_state_dict(search.state_dict())
    assert other.searches == 1 and other.recall == search.recall
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(other.search(bank.data[own], 10, own)[0], before)


def test_memory(largest_tensor):
    bank = MemoryBank(40_000, 32)
    queries, own = unit_rows(torch.rand(100, 32)), torch.arange(100)
    search = ApproximateSearch(bank, dims=4, recall_queries=0)
    with largest_tensor() as mode:
        search.search(queries, 20, own)
    assert mode.bytes <= max(search.sketch.nbytes, 8 << 20)


@pytest.mark.parametrize(
    'kwargs', [dict(dims=64), dict(dims=0), dict(oversample=0), dict(refresh=0)]
)
def test_bad_arguments(kwargs):
    name, value = next(iter(kwargs.items()))
    with pytest.raises(ValueError, match=f'{name}={value}'):
        ApproximateSearch(MemoryBank(100, 64), **{'dims': 8, **kwargs})


def test_in_a_layer():
    coupling = LayerCoupling(500, 32, k=5, approximate=dict(dims=8, oversample=3))
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        indices = torch.arange(step * 100, step * 100 + 100)
        coupling.step(
            torch.rand(100, 32, generator=generator),
            torch.randn(100, 32, generator=generator),
            indices,
        )
    assert 0 < coupling.search.recall < 1
    sketch = coupling.search.sketch.clone()
    exact = coupling.feature_bank.data @ coupling.search.basis
    assert torch.allclose(sketch, exact, atol=1e-6)
