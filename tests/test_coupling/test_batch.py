# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The batch is looked at once: what is found is named, and nothing below waits for it again."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fgc_mm.coupling import LayerCoupling
from fgc_mm.coupling.batch import Batch, LayerBatch, check_finite


class Waits(TorchDispatchMode):
    """Counts how often a number is asked for, which on a GPU waits for all before it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def make(layers=3, size=4):
    indices = torch.tensor([7, 5, 9, 2])[:size]
    names = [f'layer{n}.gate' for n in range(layers)]
    parts = {name: LayerBatch(torch.rand(size, 6), torch.randn(size, 6)) for name in names}
    return Batch(indices, None, parts, [size])


def test_all_layers_are_looked_at_together():
    with Waits() as waits:
        check_finite(make(), 'in this step')
    assert waits.count == 1


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('what', ['feature', 'logits'])
def test_the_gate_and_the_first_instance_are_named(what, bad):
    batch = make()
    rows = getattr(batch.layers['layer1.gate'], what)
    rows[1, 2] = rows[3, 0] = bad
    named = r's? of layer1\.gate contain NaN or Inf for 2 of 4 instances at iteration 12, '
    with pytest.raises(ValueError, match=rf'the {what}{named}the first is instance 5;'):
        check_finite(batch, 'at iteration 12')


def test_the_steps_of_a_layer_do_not_look_again(monkeypatch):
    coupling = LayerCoupling(500, 6, k=5)
    part, indices = make(1).layers['layer0.gate'], make(1).indices
    with monkeypatch.context() as patched:
        patched.setattr(coupling, 'find', lambda feature, logits, own: own[:, None])
        with Waits() as waits:
            coupling.loss(part.feature, part.logits, indices)
    # Whether an index is in range, on the CPU; whether an exponential has overflowed.
    assert waits.count == 2
