# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The beta CDF, against SciPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from fgc_mm.training import beta_cdf, beta_pdf

SHAPES = [(0.6, 0.4), (0.4, 0.6), (1, 1), (0.1, 0.1), (2, 5), (50, 40), (0.05, 30), (300, 2)]


def points(dtype):
    """The whole interval, dense toward both ends."""
    near_0 = torch.logspace(-35, -1, 200, dtype=torch.float64)
    near_1 = 1 - torch.logspace(-16, -1, 200, dtype=torch.float64)
    return torch.cat([torch.linspace(0, 1, 501, dtype=torch.float64), near_0, near_1]).to(dtype)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('a, b', SHAPES)
def test_value_is_scipys(a, b, dtype):
    x = points(dtype)
    value = beta_cdf(x, a, b)
    assert value.dtype == dtype
    expected = special.betainc(a, b, x.double().numpy())
    np.testing.assert_allclose(value.double().numpy(), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('a, b', SHAPES)
def test_gradient_is_scipys_density(a, b, dtype):
    x = points(dtype)
    x = x[(x > 0) & (x < 1)].requires_grad_()
    beta_cdf(x, a, b).sum().backward()
    expected = stats.beta.pdf(x.detach().double().numpy(), a, b)
    np.testing.assert_allclose(x.grad.double().numpy(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(a=st.floats(0.05, 100), b=st.floats(0.05, 100), x=st.floats(0, 1))
def test_any_shape_is_scipys(a, b, x):
    value = float(beta_cdf(torch.tensor(x, dtype=torch.float64), a, b))
    assert value == pytest.approx(float(special.betainc(a, b, x)), abs=1e-9)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_the_ends_are_finite(dtype):
    x = torch.tensor([0.0, 1.0], dtype=dtype, requires_grad=True)
    value = beta_cdf(x, 0.6, 0.4)
    value.sum().backward()
    assert value.tolist() == [0.0, 1.0]
    assert torch.isfinite(x.grad).all() and (x.grad > 0).all()
    # Behind a sigmoid nothing explodes, however sure it is.
    logits = torch.tensor([-1e4, -90, -20, 20, 90, 1e4], dtype=dtype, requires_grad=True)
    beta_cdf(torch.sigmoid(logits), 0.6, 0.4).sum().backward()
    assert torch.isfinite(logits.grad).all() and logits.grad.abs().max() < 1e-2


def test_finite_differences():
    x = torch.linspace(0.01, 0.99, 25, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: beta_cdf(x, 0.6, 0.4), x)


def test_shape_is_kept_and_half_works():
    x = torch.rand(2, 3, 4)
    assert beta_cdf(x, 0.6, 0.4).shape == (2, 3, 4)
    half = beta_cdf(x.bfloat16(), 0.6, 0.4)
    assert half.dtype == torch.bfloat16
    assert torch.isfinite(beta_pdf(torch.tensor([0.0, 1.0]).bfloat16(), 0.6, 0.4)).all()


@pytest.mark.parametrize('a, b', [(0, 1), (1, -2), (float('nan'), 1)])
def test_shapes_must_be_positive(a, b):
    with pytest.raises(ValueError, match='must both be positive'):
        beta_cdf(torch.rand(3), a, b)
