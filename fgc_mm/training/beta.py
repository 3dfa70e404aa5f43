# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The cumulative distribution function of the beta distribution."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import UsageError


def beta_cdf(x: Tensor, a: float, b: float) -> Tensor:
    """Regularized incomplete beta function ``I_x(a, b)``, differentiable in x.

    Computed in float64 by its continued fraction. The gradient is the density
    ``x^(a-1) (1-x)^(b-1) / B(a, b)``. For a or b below 1 the density has no
    bound at that end, so the gradient is taken no nearer to the ends than the
    smallest positive normal number and the largest number below 1 of x's type;
    behind a sigmoid, whose own gradient vanishes faster, the product stays
    bounded. Outside of [0, 1] value and gradient are those at the end.

    Args:
        x (Tensor): Any shape, float32 or float64 (or a half type).
        a (float): First shape parameter, positive.
        b (float): Second shape parameter, positive.

    Returns:
        Tensor: ``P(X <= x)`` for X ~ Beta(a, b), in the type of x.

    Example:
        >>> beta_cdf(torch.tensor([0.0, 0.5, 1.0]), 2.0, 2.0)
        tensor([0.0000, 0.5000, 1.0000])
    """
    if not (a > 0 and b > 0):
        raise UsageError(f'a={a} and b={b} must both be positive')
    return _BetaCDF.apply(x, float(a), float(b))


def beta_pdf(x: Tensor, a: float, b: float) -> Tensor:
    """Density of the beta distribution, its ends clamped as in :func:`beta_cdf`."""
    info = torch.finfo(x.dtype)
    inner = x.clamp(info.tiny, 1 - info.eps / 2).double()
    log_pdf = (a - 1) * inner.log() + (b - 1) * torch.log1p(-inner) - _log_beta(a, b)
    return log_pdf.exp().to(x.dtype)


class _BetaCDF(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: float, b: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.shape = (a, b)
        return _incomplete_beta(x.double().clamp(0, 1), a, b).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * beta_pdf(x, *ctx.shape), None, None


def _incomplete_beta(x: Tensor, a: float, b: float) -> Tensor:
    # The fraction converges fast below the mean; above it, I_x(a,b) = 1 - I_1-x(b,a).
    flip = x > (a + 1) / (a + b + 2)
    lower = _fraction(torch.where(flip, torch.zeros_like(x), x), a, b)
    upper = _fraction(torch.where(flip, 1 - x, torch.zeros_like(x)), b, a)
    return torch.where(flip, 1 - upper, lower)


def _fraction(x: Tensor, a: float, b: float) -> Tensor:
    """``I_x(a, b)`` for x <= (a + 1) / (a + b + 2), from the fraction's tail up."""
    terms = 6 + 4 * math.ceil(math.sqrt(max(a, b)))
    one = torch.ones((), dtype=x.dtype, device=x.device)
    value = torch.ones_like(x)
    for m in range(terms, 0, -1):
        even = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) / ((a + 2 * m - 2) * (a + 2 * m - 1))
        value = torch.addcdiv(one, x, torch.addcdiv(one, x, value, value=even), value=odd)
    front = a * x.log() + b * torch.log1p(-x)
    return (front - _log_beta(a, b)).exp() / (a * value)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
