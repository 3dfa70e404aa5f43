# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Batch shaping, against its literal form in NumPy and finite differences."""

import numpy as np
import pytest
import torch
from scipy import special

from fgc_mm.training import BatchShapingHook, L0Hook, batch_shaping, l0


def literal(probs, a=0.6, b=0.4):
    """Sort each column, compare, square, mean over the batch, sum over channels."""
    n, total = len(probs), 0.0
    for column in probs.T:
        ordered = np.sort(column)
        empirical = np.arange(1, n + 1) / (n + 1)
        total += np.mean((special.betainc(a, b, ordered) - empirical) ** 2)
    return total


def random_probs(n, channels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, channels, generator=generator, dtype=torch.float64)
    return torch.sigmoid(logits)


@pytest.mark.parametrize('n', [1, 2, 16, 101])
def test_value_is_the_literal_one(n):
    probs = random_probs(n, 7)
    assert float(batch_shaping(probs)) == pytest.approx(literal(probs.numpy()), abs=1e-9)
    single = float(batch_shaping(probs.float()))
    assert single == pytest.approx(literal(probs.numpy()), abs=1e-5)


def test_one_image_one_channel_by_hand():
    # Uniform prior: CDF(0.9) = 0.9, empirical 1/2.
    probs = torch.tensor([[0.9]], requires_grad=True)
    loss = batch_shaping(probs, 1, 1)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.16)
    assert float(probs.grad) == pytest.approx(0.8)


def test_gradient_by_finite_differences():
    logits = torch.logit(random_probs(9, 4)).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: batch_shaping(torch.sigmoid(a)), logits)
    others = random_probs(20, 4, seed=1)

    def with_others(logits):
        probs = torch.sigmoid(logits)
        return batch_shaping(probs, joint=torch.cat([others, probs.detach()]), start=20)

    assert torch.autograd.gradcheck(with_others, logits)


def test_descending_reaches_the_prior():
    torch.manual_seed(0)
    logits = torch.randn(200, 1).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        batch_shaping(torch.sigmoid(logits)).backward()
        optimizer.step()
    quantiles = np.quantile(torch.sigmoid(logits).detach().numpy(), [0.25, 0.5, 0.75])
    np.testing.assert_allclose(
        quantiles, special.betaincinv(0.6, 0.4, [0.25, 0.5, 0.75]), atol=0.03
    )


def test_others_join_the_sort_but_not_the_mean():
    """Splitting a batch into parts that see each other changes nothing."""
    whole = random_probs(12, 5)
    whole[[2, 6, 9], 1] = 1.0  # saturated gates are equal
    whole.requires_grad_()
    batch_shaping(whole).backward()
    parts = [p.detach().requires_grad_() for p in whole.split([4, 8])]
    joint = torch.cat(parts).detach()
    losses = [batch_shaping(p, joint=joint, start=s) for p, s in zip(parts, (0, 4), strict=True)]
    together = (4 * losses[0] + 8 * losses[1]) / 12
    assert float(together.detach()) == pytest.approx(float(batch_shaping(whole.detach())))
    together.backward()
    torch.testing.assert_close(torch.cat([p.grad for p in parts]), whole.grad)


def test_l0_by_hand():
    probs = dict(one=torch.tensor([[0.5, 1.0]]), two=torch.tensor([[0.25]]))
    assert float(l0(probs)) == pytest.approx(1.75 / 3)
    # Weights 1, 1, 6: (0.5 + 1 + 6 * 0.25) / 8.
    assert float(l0(probs, dict(one=1.0, two=6.0))) == pytest.approx(3 / 8)
    ones = {name: torch.ones_like(p) for name, p in probs.items()}
    assert float(l0(ones, dict(one=3.0, two=5.0))) == pytest.approx(1.0)


@pytest.mark.parametrize(
    'build, message',
    [
        (lambda: L0Hook(cost='flops'), "cost='flops' must be 'channels' or 'macs'"),
        (lambda: L0Hook(rho=dict(value=0.4)), "L0Hook: rho=.*lacks the key 'start'"),
        (lambda: L0Hook(log_interval=0), 'L0Hook: log_interval=0'),
        (lambda: BatchShapingHook(a=0), 'a=0 and b=0.4 must both be positive'),
        (lambda: BatchShapingHook(gather='all'), "gather='all' must be 'ranks' or None"),
        (lambda: BatchShapingHook(history=-1), 'history=-1'),
        (lambda: BatchShapingHook(zeta='x'), "BatchShapingHook: zeta='x'"),
    ],
)
def test_wrong_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
