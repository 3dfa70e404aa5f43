# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The layers benchmarks/fgc.py compares, and what they are run on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fgc_mm.coupling import LayerCoupling
from fgc_mm.coupling.memory_bank import unit_rows


class PlainCoupling:
    """The equations as one would write them down; banks start as given."""

    def __init__(self, like: LayerCoupling) -> None:
        self.k, self.tau, self.form = like.k, like.tau, like.form
        self.features = like.feature_bank.data.clone()
        self.gates = like.gate_bank.data.clone()

    def loss(self, feature: Tensor, logits: Tensor, indices: Tensor) -> Tensor:
        z = F.normalize(feature.detach(), dim=1)
        similarity = z @ self.features.t()
        similarity[torch.arange(len(z)), indices] = -1e9
        neighbors = similarity.topk(self.k, dim=1).indices
        log_p = F.log_softmax(logits @ self.gates.t() / self.tau, dim=1)
        if self.form == 'log_sum':
            positives = torch.cat((indices[:, None], neighbors), dim=1)
            loss = -log_p.gather(1, positives).logsumexp(dim=1).mean()
        else:
            loss = -log_p.gather(1, neighbors).sum(dim=1).mean()
            loss = loss / self.k if self.form == 'mean_log' else loss
        return loss

    @torch.no_grad()
    def update(self, feature: Tensor, logits: Tensor, indices: Tensor) -> None:
        z = F.normalize(feature, dim=1)
        for bank, value in ((self.features, z), (self.gates, logits)):
            bank[indices] = F.normalize(0.5 * bank[indices] + 0.5 * value, dim=1)


def trained_layer(size: int, args, dim: int, **kwargs) -> LayerCoupling:
    """A layer whose banks look like those of a trained network: ten classes."""
    layer = LayerCoupling(size, dim, k=args.k, form=args.form, **kwargs)
    generator = torch.Generator().manual_seed(1)
    centers = torch.randn(10, dim, generator=generator)
    rows = max(1, (1 << 22) // dim)
    for start in range(0, size, rows):
        f, g = (
            layer.feature_bank.data[start : start + rows],
            layer.gate_bank.data[start : start + rows],
        )
        label = torch.randint(10, (len(f),), generator=generator)
        f.copy_(unit_rows((centers[label] + 8 * f).relu_()))
        g.copy_(unit_rows(2 + 0.5 * centers[label] + 4 * g))
    return layer


def batch_of(layer: LayerCoupling, args) -> tuple[Tensor, Tensor, Tensor]:
    """Features and logits near the instances' rows, as in training."""
    generator = torch.Generator().manual_seed(2)
    indices = torch.randperm(layer.num_instances, generator=generator)[: args.batch]
    noise = torch.rand(args.batch, layer.dim, generator=generator)
    feature = layer.feature_bank.data[indices] + 0.5 * noise / layer.dim**0.5
    logits = 2 * layer.dim**0.5 * layer.gate_bank.data[indices]
    return feature, logits + 0.1 * noise, indices


def run_ours(layer: LayerCoupling, batch: tuple) -> Tensor:
    feature, logits, indices = batch[0], batch[1].clone().requires_grad_(), batch[2]
    layer.step(feature, logits, indices).loss.backward()
    return logits.grad


def run_plain(layer: PlainCoupling, batch: tuple) -> Tensor:
    feature, logits, indices = batch[0], batch[1].clone().requires_grad_(), batch[2]
    layer.loss(feature, logits, indices).backward()
    layer.update(feature, logits, indices)
    return logits.grad
