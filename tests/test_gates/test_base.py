# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What holds for every gate."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from mmengine.registry import MODELS

from fgc_mm.gates import Gate, GateRecord

CONFIGS = [
    dict(type='BinConcreteGate'),
    dict(type='BinConcreteGate', norm_cfg=dict(type='LN')),
    dict(type='BinConcreteGate', norm_cfg=None, bias_init=0.0),
    dict(type='FBSGate', density=0.5),
]


def build(cfg):
    torch.manual_seed(0)
    return MODELS.build(dict(cfg, in_channels=6, channels=10))


@pytest.fixture(params=CONFIGS, ids=lambda cfg: '-'.join(map(str, cfg.values())))
def gate(request):
    return build(request.param)


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('batch', [1, 3])
def test_record(gate, training, batch):
    """A decision leaves logits, probabilities and a 0/1 mask of its batch."""
    gate.train(training)
    multiplier = gate(torch.rand(batch, 6, 5, 4))
    record = gate.record
    assert multiplier.shape == record.logits.shape == record.probs.shape == (batch, 10)
    assert record.mask.unique().tolist() in ([0.0, 1.0], [1.0], [0.0])
    assert torch.equal(record.mask, (multiplier != 0).float())
    assert record.probs.min() >= 0 and record.probs.max() <= 1
    assert record.feature is None


def test_pooled_input_is_as_good(gate):
    gate.eval()
    x = torch.randn(3, 6, 5, 4)
    assert torch.equal(gate(x), gate(gate.pool(x)))


def test_evaluation_is_deterministic_and_each_image_alone(gate):
    gate.eval()
    x = torch.randn(5, 6, 4, 4)
    mask = gate(x)
    assert torch.equal(mask, gate(x))
    for i in range(5):
        assert torch.allclose(gate(x[i : i + 1]), mask[i : i + 1], atol=1e-6)


def test_decides_in_single_precision_under_autocast(gate):
    """Half precision reaches the gate's input at most."""
    gate.eval()
    x = torch.rand(4, 6, 5, 4)
    expected = gate(x)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(gate(x), expected)
        assert gate(x.bfloat16()).dtype == torch.float32
    assert gate.record.logits.dtype == torch.float32


def test_record_drops_its_graph_with_the_gradient(gate):
    gate.train()
    multiplier = gate(torch.rand(3, 6))
    record = gate.record
    assert record.logits.requires_grad
    node = weakref.ref(record.logits)
    (multiplier.sum() + record.probs.sum() + record.logits.sum()).backward()
    del multiplier
    gc.collect()
    assert gate.record is record and record.logits.grad_fn is None
    assert not record.probs.requires_grad and not record.mask.requires_grad
    assert node() is None  # the tensor that hung in the graph is gone


def test_gradient_of_an_earlier_pass_leaves_the_later_record_alone(gate):
    gate.train()
    first = gate(torch.rand(3, 6))
    gate(torch.rand(3, 6))
    first.sum().backward()
    assert gate.record.logits.requires_grad
    gate.record.logits.sum().backward()
    assert not gate.record.logits.requires_grad


def test_copies_and_pickles_start_without_a_record(gate):
    gate.train()(torch.rand(3, 6))
    for other in (copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        assert other.record is None and gate.record is not None
        x = torch.rand(2, 6)
        assert torch.equal(other.eval()(x), gate.eval()(x))


def test_errors_name_the_widths(gate):
    with pytest.raises(ValueError, match=r'\(2, 7, 3, 3\) does not fit in_channels=6|\(2, 7\)'):
        gate(torch.rand(2, 7, 3, 3))


def test_a_new_gate_needs_only_decide():
    """The protocol carries another method in five lines."""

    class EveryOther(Gate):
        def decide(self, pooled):
            mask = torch.zeros(len(pooled), self.channels)
            mask[:, ::2] = 1
            return mask, GateRecord(mask, mask, mask)

    gate = EveryOther(3, 4)
    gate.init_weights()
    assert gate(torch.rand(2, 3, 4, 4)).tolist() == [[1, 0, 1, 0]] * 2
    with pytest.raises(TypeError, match='abstract'):
        Gate(3, 4)
