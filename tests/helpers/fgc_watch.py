# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A dense float64 computation that follows a training with FGCHook."""

import copy
import math

import pytest
import torch
from mmengine.hooks import Hook

from fgc_mm.gates import find_gates
from fgc_mm.runtime import unwrap
from fgc_mm.training import FGCHook

LAST_TWO = ['backbone.gates.layer3-1-conv1', 'backbone.gates.layer3-2-conv1']
FGC = dict(type='FGCHook', layers=[-2, -1], k=5, eta=0.1, form='log_sum', log_interval=1)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


class Watch(Hook):
    """Follows a training with dense float64 copies of the banks."""

    priority = 'VERY_LOW'

    def __init__(self):
        self.batches, self.losses, self.neighbors = [], [], []

    def before_train(self, runner):
        self.hook = next(h for h in runner.hooks if isinstance(h, FGCHook))
        self.start = copy.deepcopy(unwrap(runner.model))
        self.banks = {
            name: [c.feature_bank.data.double().clone(), c.gate_bank.data.double().clone()]
            for name, c in self.hook.coupling.layers.items()
        }

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        gates = find_gates(unwrap(runner.model))
        self.batches.append(
            dict(
                indices=torch.tensor([s.instance_idx for s in data_batch['data_samples']]),
                records={
                    name: (gates[name].record.feature.double(), gates[name].record.logits.double())
                    for name in self.banks
                },
                loss=float(outputs['loss_fgc'].detach()),
            )
        )

    def replay(self, k=5, eta=0.1, form='log_sum', source='feature', warmup=lambda step: False,
               space='logits', shared=False, labels=None):  # fmt: skip
        """The losses that should have come out; leaves the banks as they should be."""
        losses = []
        for step, batch in enumerate(self.batches):
            total, indices, chosen = 0.0, batch['indices'], {}
            for name in reversed(list(self.banks)):
                feature, a = batch['records'][name]
                a = torch.sigmoid(a) if space == 'probs' else a
                v_f, v_g = self.banks[name]
                query, bank = (feature, v_f) if source == 'feature' else (a, v_g)
                similarity = unit(query) @ bank.t()
                similarity[torch.arange(len(indices)), indices] = -math.inf
                near = similarity.topk(k, dim=1).indices
                if shared and chosen:
                    near = next(iter(chosen.values()))
                chosen[name] = near
                log_p = torch.log_softmax(a @ v_g.t() / 0.07, dim=1)
                if warmup(step):
                    near = indices[:, None]
                elif form == 'log_sum':
                    near = torch.cat((indices[:, None], near), dim=1)
                picked = log_p.gather(1, near)
                total += dict(
                    log_sum=-picked.logsumexp(1), sum_log=-picked.sum(1), mean_log=-picked.mean(1)
                )[form].mean()
            losses.append(float(eta * total))
            self.neighbors.append(chosen)
            for name, (v_f, v_g) in self.banks.items():
                feature, a = batch['records'][name]
                a = torch.sigmoid(a) if space == 'probs' else a
                for i, z, gate in zip(indices.tolist(), unit(feature), a, strict=True):
                    v_f[i] = unit(0.5 * v_f[i] + 0.5 * z)
                    v_g[i] = unit(0.5 * v_g[i] + 0.5 * gate)
        return losses

    def check(self, steps, **how):
        assert len(self.batches) == steps
        expected = self.replay(**how)
        assert [batch['loss'] for batch in self.batches] == pytest.approx(
            expected, rel=1e-4, abs=5e-6
        )
        assert len(set(expected)) == steps
        for name, (v_f, v_g) in self.banks.items():
            c = self.hook.coupling.layers[name]
            torch.testing.assert_close(c.feature_bank.data.double(), v_f, rtol=0, atol=1e-5)
            torch.testing.assert_close(c.gate_bank.data.double(), v_g, rtol=0, atol=1e-5)
