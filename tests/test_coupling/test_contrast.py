# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fgc_mm.coupling.contrast import contrast_and_gradient, with_gradient
from fgc_mm.coupling.memory_bank import unit_rows

FORMS = ('sum_log', 'mean_log', 'log_sum')


def dense(queries, bank, positives, form, tau=0.07):
    """The equations as they stand, one instance at a time, in float64.

    Returns the loss per instance and the gradient of their sum.
    """
    a = queries.detach().double().requires_grad_()
    losses = []
    for i in range(len(a)):
        logits = bank.double() @ a[i] / tau
        log_p = logits - torch.logsumexp(logits, 0)
        picked = log_p[positives[i][positives[i] >= 0]]
        if not len(picked):
            losses.append(a[i].sum() * 0)
        elif form == 'log_sum':
            losses.append(-torch.logsumexp(picked, 0))
        else:
            losses.append(-picked.sum() / (len(picked) if form == 'mean_log' else 1))
    loss = torch.stack(losses)
    return loss.detach(), torch.autograd.grad(loss.sum(), a)[0]


def compare(queries, bank, positives, form, tau=0.07, chunk=None, tolerance=1e-5):
    loss, found = contrast_and_gradient(queries, bank, positives, form, tau, chunk)
    expected, gradient = dense(queries, bank, positives, form, tau)
    assert (loss - expected).norm() <= tolerance * expected.norm()
    assert (found - gradient).norm() <= tolerance * gradient.norm()


def make(batch, size, dim, k, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bank = unit_rows(torch.randn(size, dim, generator=generator))
    queries = scale * torch.randn(batch, dim, generator=generator)
    positives = torch.randint(size, (batch, k), generator=generator)
    return queries, bank, positives


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('k', [1, 4, 200])
@pytest.mark.parametrize('chunk', [None, 256, 1000, 1])
def test_against_dense_float64(form, k, chunk):
    # 1003 is a multiple of no chunk but one; 200 draws of 1003 repeat rows.
    compare(*make(6, 1003, 16, k), form, chunk=chunk)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('scale', [1e-3, 10.0, 50.0])
def test_logits_from_flat_to_thousands(form, scale):
    compare(*make(8, 700, 64, 4, scale), form, chunk=128)


@pytest.mark.parametrize('form', FORMS)
def test_gates_as_they_are_trained(form):
    """Open gates, a bank of similar rows: logits near 230, small differences."""
    generator = torch.Generator().manual_seed(0)
    bank = unit_rows(2 + 0.5 * torch.randn(3000, 64, generator=generator))
    queries = 2 + 0.5 * torch.randn(16, 64, generator=generator)
    compare(queries, bank, torch.randint(3000, (16, 50), generator=generator), form)


@pytest.mark.parametrize('form', FORMS)
def test_float64_queries_are_computed_in_float64(form):
    queries, bank, positives = make(5, 503, 16, 7, scale=20.0)
    compare(queries.double(), bank, positives, form, chunk=100, tolerance=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 9),
    size=st.integers(2, 60),
    dim=st.integers(1, 12),
    k=st.integers(1, 20),
    chunk=st.integers(1, 70),
    form=st.sampled_from(FORMS),
    half=st.booleans(),
    missing=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_shape(batch, size, dim, k, chunk, form, half, missing, seed):
    queries, bank, positives = make(batch, size, dim, k, seed=seed)
    if half:
        bank = bank.half()
    if missing:
        positives[torch.rand(positives.shape) < 0.5] = -1
    loss, found = contrast_and_gradient(queries, bank, positives, form, chunk=chunk)
    expected, gradient = dense(queries, bank, positives, form)
    # Absolute: loss and gradient may be nearly zero in banks this small, where
    # float32 logits of up to 60 leave an error of 1e-5.
    assert torch.allclose(loss.double(), expected, rtol=1e-5, atol=2e-4)
    assert torch.allclose(found.double(), gradient, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize('form', FORMS)
def test_the_later_piece_may_hold_the_largest_logits_by_far(form):
    bank = torch.cat((torch.zeros(50, 4), torch.eye(4)))
    queries = torch.tensor([[90.0, 0.0, 1.0, 0.0]])
    compare(queries, bank, torch.tensor([[51, 3]]), form, chunk=10)
    compare(queries, bank.flip(0), torch.tensor([[2, 53]]), form, chunk=10)


def test_numbers_by_hand():
    """Two rows, one positive: softplus of the difference of the logits."""
    bank = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    a = torch.tensor([[0.07, 0.21]])
    loss, gradient = contrast_and_gradient(a, bank, torch.tensor([[0]]), 'sum_log')
    assert loss.item() == pytest.approx(math.log1p(math.exp(2.0)), rel=1e-6)
    p1 = 1 / (1 + math.exp(-2.0))
    assert gradient[0].tolist() == pytest.approx([-p1 / 0.07, p1 / 0.07], rel=1e-5)


def test_log_sum_over_all_rows_is_zero():
    queries, bank, _ = make(3, 40, 8, 1)
    positives = torch.arange(40).expand(3, 40)
    loss, gradient = contrast_and_gradient(queries, bank, positives, 'log_sum', chunk=7)
    assert loss.abs().max() < 1e-5 and gradient.abs().max() < 1e-4


def test_a_loss_with_a_known_gradient():
    queries, bank, positives = make(5, 100, 8, 3)
    bank.requires_grad_()
    a = queries.clone().requires_grad_()
    weights = torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0])
    each, gradient = contrast_and_gradient(a, bank, positives)
    assert each.shape == (5,) and not each.requires_grad and not gradient.requires_grad
    loss = with_gradient(a, (weights * each).sum(), weights[:, None] * gradient)
    assert loss == (weights * each).sum()
    (3 * loss).backward()
    expected = 3 * dense(queries, bank, positives, 'mean_log')[1] * weights[:, None]
    assert torch.allclose(a.grad.double(), expected, rtol=1e-4, atol=1e-4)
    assert bank.grad is None


def test_an_instance_without_positives_contributes_nothing():
    queries, bank, positives = make(3, 100, 8, 3)
    positives[1] = -1
    for form in FORMS:
        loss, gradient = contrast_and_gradient(queries, bank, positives, form)
        assert loss[1] == 0 and not gradient[1].any() and gradient[0].any()


def test_float32_under_autocast_and_for_half_queries():
    queries, bank, positives = make(8, 500, 32, 20)
    expected, gradient = dense(queries, bank, positives, 'sum_log')
    with torch.autocast('cpu', torch.bfloat16):
        loss, found = contrast_and_gradient(queries, bank, positives, 'sum_log')
    assert loss.dtype == torch.float32
    assert (loss - expected).norm() <= 1e-5 * expected.norm()
    assert (found - gradient).norm() <= 1e-5 * gradient.norm()

    half = queries.bfloat16().requires_grad_()
    loss, found = contrast_and_gradient(half, bank, positives, 'sum_log')
    expected = dense(half.float(), bank, positives, 'sum_log')[0]
    assert (loss - expected).norm() <= 1e-5 * expected.norm()
    with_gradient(half, loss.sum(), found).backward()
    assert half.grad.dtype == torch.bfloat16


def test_float16_bank_in_pieces():
    queries, bank, positives = make(8, 903, 32, 20)
    compare(queries, bank.half(), positives, 'log_sum', chunk=100)


def test_memory_does_not_grow_with_batch_times_bank(largest_tensor):
    """The plain way needs 4 B N bytes per buffer: 16 MB, then 64 MB."""
    largest = []
    for size in (40_000, 160_000):
        queries, bank, positives = make(100, size, 4, 20)
        with largest_tensor() as mode:
            contrast_and_gradient(queries, bank, positives)
        largest.append(mode.bytes)
    assert largest[0] == largest[1] <= 4 << 20


def test_nothing_of_the_bank_size_is_kept_for_backward():
    queries, bank, positives = make(10, 5000, 8, 20)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        each, gradient = contrast_and_gradient(queries.requires_grad_(), bank, positives)
        with_gradient(queries, each.sum(), gradient)
    assert kept == [queries.numel()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason='requires CUDA')
@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('bank_device', ['cuda', 'cpu'])
def test_on_a_gpu(form, bank_device):
    queries, bank, positives = make(8, 903, 32, 20)
    given = queries.cuda(), bank.to(bank_device), positives.cuda()
    loss, found = contrast_and_gradient(*given, form)
    expected, gradient = dense(queries, bank, positives, form)
    assert (loss.cpu() - expected).norm() <= 1e-5 * expected.norm()
    assert (found.cpu() - gradient).norm() <= 1e-5 * gradient.norm()


def test_logits_far_above_those_of_a_sample():
    """The row of the query itself beats all others by more than float32 can hold."""
    torch.manual_seed(0)
    bank = unit_rows(torch.randn(5000, 32))
    queries = 150 * bank[[1, 3]]
    positives = torch.tensor([[1, 17], [9, 4999]])
    reference = queries.double().requires_grad_()
    log_p = (reference @ bank.double().t() / 0.07).log_softmax(dim=1)
    expected = -log_p.gather(1, positives).mean(dim=1)
    expected.sum().backward()

    loss, gradient = contrast_and_gradient(queries, bank, positives, 'mean_log', 0.07)

    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), reference.grad, rtol=1e-5, atol=2e-5)
