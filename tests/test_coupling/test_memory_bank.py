# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fgc_mm.coupling import MemoryBank
from fgc_mm.coupling.memory_bank import unit_rows


def literal_update(data, indices, vectors, momentum, normalize_input):
    """One instance after the other, in float64."""
    data = data.double().clone()
    for i, v in zip(indices.tolist(), vectors.double(), strict=True):
        if normalize_input and v.norm() > 0:
            v = v / v.norm()
        mixed = momentum * data[i] + (1 - momentum) * v
        if v.norm() > 0 and mixed.norm() > 0:
            data[i] = mixed / mixed.norm()
    return data


def test_rows_start_as_random_unit_vectors_of_the_seed():
    bank = MemoryBank(5000, 16, seed=3)
    assert torch.allclose(bank.data.norm(dim=1), torch.ones(5000), atol=1e-6)
    # Isotropic: the mean of 5000 unit vectors is about 1 / sqrt(5000) long.
    assert bank.data.mean(0).norm() < 4 / math.sqrt(5000)
    assert torch.equal(bank.data, MemoryBank(5000, 16, seed=3).data)
    assert not torch.equal(bank.data, MemoryBank(5000, 16, seed=4).data)


@pytest.mark.parametrize('normalize_input', [True, False])
@pytest.mark.parametrize('momentum', [0.5, 0.9, 0.0])
def test_update_is_the_momentum_rule_and_touches_nothing_else(momentum, normalize_input):
    bank = MemoryBank(50, 8, momentum=momentum, normalize_input=normalize_input)
    before = bank.data.clone()
    indices = torch.tensor([4, 40, 7])
    vectors = 5 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    bank.update(indices, vectors)
    expected = literal_update(before, indices, vectors, momentum, normalize_input)
    assert torch.allclose(bank.data.double(), expected, atol=1e-6)
    untouched = [i for i in range(50) if i not in indices.tolist()]
    assert torch.equal(bank.data[untouched], before[untouched])
    assert not torch.equal(bank.data[indices], before[indices])


@settings(max_examples=40, deadline=None)
@given(
    indices=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    half=st.booleans(),
    normalize_input=st.booleans(),
    seed=st.integers(0, 100),
)
def test_repeated_indices_are_applied_in_batch_order(indices, half, normalize_input, seed):
    dtype = 'float16' if half else 'float32'
    bank = MemoryBank(6, 4, dtype=dtype, normalize_input=normalize_input)
    before = bank.data.clone()
    vectors = torch.randn(len(indices), 4, generator=torch.Generator().manual_seed(seed))
    vectors[seed % len(indices)] = 0
    one_by_one = MemoryBank(6, 4, dtype=dtype, normalize_input=normalize_input)
    for i, v in zip(indices, vectors, strict=True):
        one_by_one.update(torch.tensor([i]), v[None])
    indices = torch.tensor(indices)
    bank.update(indices, vectors)
    assert torch.equal(bank.data, one_by_one.data)
    expected = literal_update(before, indices, vectors, 0.5, normalize_input)
    # A row that nearly cancels keeps the relative error of its short remainder.
    close = (bank.data.double() - expected).abs().amax(dim=1) < (3e-2 if half else 1e-3)
    assert bool(close.all())


def test_zero_vectors_and_extreme_lengths():
    bank = MemoryBank(6, 4, normalize_input=False)
    before = bank.data.clone()
    bank.update(torch.tensor([0, 1]), torch.zeros(2, 4))
    assert torch.equal(bank.data, before)
    bank.update(torch.tensor([2]), -before[2:3])  # cancels the row exactly
    assert torch.equal(bank.data, before)
    direction = torch.tensor([[3.0, 0.0, 4.0, 0.0]])
    bank.update(torch.tensor([3]), direction * 5e37)
    assert torch.allclose(bank.data[3], direction[0] / 5, atol=1e-6)
    bank = MemoryBank(6, 4)
    bank.update(torch.tensor([4]), direction * 1e-30)
    expected = literal_update(before, torch.tensor([4]), direction, 0.5, True)
    assert torch.allclose(bank.data.double(), expected, atol=1e-6)


def test_unit_rows_of_zero_tiny_and_huge():
    x = torch.tensor([[0.0, 0.0], [3e-37, 4e-37], [3e38, 0.0]])
    assert torch.allclose(unit_rows(x), torch.tensor([[0.0, 0.0], [0.6, 0.8], [1.0, 0.0]]))


@pytest.mark.parametrize('index', [-1, 20, 10**12])
def test_index_out_of_range_names_index_and_size(index):
    bank = MemoryBank(20, 4)
    before = bank.data.clone()
    with pytest.raises(IndexError, match=rf'{index} .*N=20'):
        bank.update(torch.tensor([0, index]), torch.rand(2, 4))
    assert torch.equal(bank.data, before)


def test_wrong_shapes_and_arguments():
    bank = MemoryBank(20, 4)
    with pytest.raises(ValueError, match=r'\(2, 4\).*\(2, 5\)'):
        bank.update(torch.arange(2), torch.rand(2, 5))
    with pytest.raises(ValueError, match=r'\(3, 4\).*\(2, 4\)'):
        bank.update(torch.arange(3), torch.rand(2, 4))
    with pytest.raises(ValueError, match='integers'):
        bank.update(torch.rand(2), torch.rand(2, 4))
    for kwargs, word in (
        (dict(num_instances=0), 'num_instances=0'),
        (dict(dtype='int8'), 'int8'),
        (dict(storage='cloud'), 'cloud'),
        (dict(momentum=1.0), 'momentum=1.0'),
        (dict(path='x'), 'mmap'),
    ):
        with pytest.raises(ValueError, match=word):
            MemoryBank(**{**dict(num_instances=20, dim=4), **kwargs})


def test_empty_batch():
    bank = MemoryBank(20, 4)
    before = bank.data.clone()
    bank.update(torch.arange(0), torch.rand(0, 4))
    assert torch.equal(bank.data, before)


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('storage', ['host', 'mmap'])
def test_storages_hold_the_same(storage, dtype, tmp_path):
    path = str(tmp_path / 'sub' / 'v.bank') if storage == 'mmap' else None
    bank = MemoryBank(300, 8, dtype=dtype, storage=storage, path=path, seed=1)
    plain = MemoryBank(300, 8, dtype=dtype, seed=1)
    indices, vectors = torch.tensor([5, 6, 5]), torch.rand(3, 8)
    for each in (bank, plain):
        each.update(indices, vectors)
    assert torch.equal(bank.data, plain.data)
    if path:
        on_disk = np.fromfile(path, dtype=dtype).reshape(300, 8)
        assert np.array_equal(on_disk, plain.data.numpy())
        with pytest.raises(ValueError, match='in use'):
            MemoryBank(300, 8, storage='mmap', path=path)
        assert torch.equal(bank.data, plain.data)


def test_mmap_without_a_path_and_a_second_use_of_a_file(tmp_path):
    bank = MemoryBank(30, 8, storage='mmap')
    bank.update(torch.tensor([3]), torch.rand(1, 8))
    path = str(tmp_path / 'v.bank')
    first = MemoryBank(30, 8, storage='mmap', path=path)
    del first
    assert MemoryBank(10, 4, storage='mmap', path=path).data.shape == (10, 4)
    assert (tmp_path / 'v.bank').stat().st_size == 10 * 4 * 4


def test_float16_bank_follows_the_float32_one():
    banks = [MemoryBank(40, 16, dtype=d) for d in ('float32', 'float16')]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        indices = torch.randint(40, (16,), generator=generator)
        vectors = torch.randn(16, 16, generator=generator)
        for bank in banks:
            bank.update(indices, vectors)
    assert banks[1].data.dtype == torch.float16
    assert (banks[0].data - banks[1].data.float()).abs().max() < 2e-3


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_state_round_trip_through_a_file(dtype):
    bank = MemoryBank(40, 6, dtype=dtype, seed=1)
    bank.update(torch.arange(10), torch.rand(10, 6))
    file = io.BytesIO()
    torch.save(bank.state_dict(), file)
    file.seek(0)
    other = MemoryBank(40, 6, dtype=dtype, seed=2)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.data, bank.data)
    more = torch.rand(3, 6)
    for each in (bank, other):
        each.update(torch.tensor([0, 20, 0]), more)
    assert torch.equal(other.data, bank.data)


def test_state_of_another_bank_is_refused_with_all_reasons():
    bank = MemoryBank(40, 6)
    before = bank.data.clone()
    with pytest.raises(ValueError, match='num_instances is 41 there and 40 here') as error:
        bank.load_state_dict(MemoryBank(41, 7, dtype='float16').state_dict())
    assert 'dim is 7' in str(error.value) and "'float16'" in str(error.value)
    assert torch.equal(bank.data, before)


def test_a_bank_is_not_part_of_a_model():
    model = torch.nn.Linear(2, 2)
    model.bank = MemoryBank(10, 4)
    assert set(model.state_dict()) == {'weight', 'bias'}
    assert not list(model.buffers())


@pytest.mark.skipif(not torch.cuda.is_available(), reason='requires CUDA')
def test_bank_on_a_gpu_is_the_bank_on_the_cpu():
    banks = [MemoryBank(100, 8, device=d) for d in ('cpu', 'cuda')]
    assert torch.equal(banks[0].data, banks[1].data.cpu())
    indices, vectors = torch.tensor([3, 3, 9]), torch.rand(3, 8)
    for bank in banks:
        bank.update(indices, vectors.to(bank.data.device))
    assert torch.allclose(banks[0].data, banks[1].data.cpu(), atol=1e-6)


def test_a_state_that_is_no_numbers_is_refused():
    bank = MemoryBank(4, 3)
    before = bank.data.clone()
    for bad in (float('nan'), float('inf')):
        state = {**bank.state_dict(), 'data': before.clone()}
        state['data'][3, 1] = bad
        with pytest.raises(ValueError, match='holds NaN or Inf'):
            bank.load_state_dict(state)
    assert torch.equal(bank.data, before)
