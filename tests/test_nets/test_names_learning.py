# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Gates learn whatever else is going on, and leave nothing behind."""

import copy
import gc
import io
import pickle
import resource

import pytest
import torch
import torch.nn as nn
from gated_resnets import GATES, assert_gates_have_gradients, grads, images, loss_of, make, train
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import OptimWrapper

from fgc_mm.gates import find_gates


@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('depth', [18, 50])
def test_gates_learn_from_the_task(depth, gate):
    model = train(make(depth, gate=GATES[gate]))
    loss_of(model, images()).backward()
    assert_gates_have_gradients(model)


def test_a_step_on_the_openness_closes_channels():
    model = train(make(18, gate=dict(type='BinConcreteGate')))
    optimizer = torch.optim.SGD(
        [value for name, value in model.named_parameters() if name.startswith('gates.')], lr=10.0
    )
    x = images()
    opened = []
    for _ in range(30):
        model(x)
        openness = torch.stack([gate.record.probs.mean() for gate in find_gates(model).values()])
        optimizer.zero_grad()
        openness.sum().backward()
        optimizer.step()
        opened.append(openness.mean().item())
    assert opened[0] > 0.7 and opened[-1] < 0.2
    model.eval()
    model(x)
    masks = [gate.record.mask.mean() for gate in find_gates(model).values()]
    assert sum(masks) / len(masks) < 0.4


@pytest.mark.parametrize('frozen', [0, 1, 4])
def test_gates_learn_in_frozen_stages(frozen):
    model = train(make(18, frozen_stages=frozen))
    loss_of(model, images()).backward()
    assert_gates_have_gradients(model)
    stages = ['conv1', 'bn1'] + [f'layer{i}' for i in range(1, frozen + 1)]
    for name, value in model.named_parameters():
        frozen_here = name.split('.')[0] in stages and not name.startswith('gates.')
        assert value.requires_grad != frozen_here, name
        assert (value.grad is None) == frozen_here, name
    for name in stages:
        for module in model.get_submodule(name).modules():
            if isinstance(module, nn.BatchNorm2d):
                assert not module.training
    model.eval()
    assert not any(gate.training for gate in find_gates(model).values())


def test_gates_learn_under_norm_eval():
    model = train(make(18, norm_eval=True, gate=GATES['bn']))
    assert not any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    before = model.gates.of('layer1.0.conv1').norm.running_mean.clone()
    loss_of(model, images()).backward()
    assert_gates_have_gradients(model)
    assert not torch.equal(model.gates.of('layer1.0.conv1').norm.running_mean, before)


def test_gates_follow_freeze_if_asked():
    model = make(18, frozen_stages=1, norm_eval=True, gate=GATES['bn'], gates_follow_freeze=True)
    model.train()
    frozen, free = model.gates.of('layer1.0.conv1'), model.gates.of('layer2.0.conv1')
    assert not frozen.training and not any(p.requires_grad for p in frozen.parameters())
    assert free.training and all(p.requires_grad for p in free.parameters())
    assert not free.norm.training
    masks = [(model(images()), frozen.record.mask)[1] for _ in range(2)]
    assert torch.equal(*masks)  # frozen gates do not sample


def test_a_gate_the_user_froze_stays_frozen():
    model = make(18, frozen_stages=1)
    model.gates.of('layer1.0.conv1').requires_grad_(False)
    model.train()
    assert not any(p.requires_grad for p in model.gates.of('layer1.0.conv1').parameters())


@pytest.mark.parametrize('frozen', [-1, 1])
@pytest.mark.parametrize('depth', [18, 50])
def test_checkpointing_changes_nothing(depth, frozen):
    """Same masks, records, outputs and gradients, of gates and the rest."""
    results = []
    for with_cp in (False, True):
        model = train(make(depth, with_cp=with_cp, frozen_stages=frozen, norm_eval=True))
        torch.manual_seed(5)
        outs = model(images())
        records = {name: gate.record for name, gate in find_gates(model).items()}
        extra = sum(
            record.probs.mean() + record.logits.square().mean() for record in records.values()
        )
        (sum(out.square().mean() for out in outs) + extra).backward()
        results.append((outs, records, grads(model, only_gates=False)))
        assert_gates_have_gradients(model)
    (outs, records, plain), (outs_cp, records_cp, checkpointed) = results
    assert all(torch.equal(a, b) for a, b in zip(outs, outs_cp, strict=True))
    for name, record in records.items():
        assert torch.equal(record.mask, records_cp[name].mask)
    for name, grad in plain.items():
        if grad is None:
            assert checkpointed[name] is None
        else:
            assert torch.allclose(checkpointed[name], grad, rtol=1e-4, atol=1e-6), name


def test_checkpointing_recomputes():
    """with_cp is not an ornament: convolutions run again in the backward pass."""
    model = train(make(18, with_cp=True))
    calls = []
    model.layer2[0].conv1.register_forward_hook(lambda *args: calls.append('conv'))
    model.gates.of('layer2.0.conv1').register_forward_hook(lambda *args: calls.append('gate'))
    loss_of(model, images()).backward()
    assert calls == ['gate', 'conv', 'conv']
    calls.clear()
    with torch.no_grad():
        model(images())
    assert calls == ['gate', 'conv']


@pytest.mark.parametrize('gate', GATES)
def test_a_batch_of_one_trains(gate):
    model = train(make(50, gate=GATES[gate]))
    loss_of(model, images(4)).backward()
    model.zero_grad()
    loss_of(model, images(4)[2:3]).backward()
    assert_gates_have_gradients(model)


@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('with_cp', [False, True])
def test_autocast(gate, with_cp):
    model = train(make(50, gate=GATES[gate], with_cp=with_cp))
    with torch.autocast('cpu', torch.bfloat16):
        loss = loss_of(model, images())
    for module in find_gates(model).values():
        assert module.record.logits.dtype == torch.float32
        assert module.record.mask.unique().tolist() == [0.0, 1.0]
    loss.backward()
    assert_gates_have_gradients(model)


def test_gradient_accumulation():
    """mmengine accumulates two batches: the sum of their gradients, one step."""
    model = train(make(18, norm_eval=True))
    batches = images(4).split(2)
    separate = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        model.zero_grad()
        loss_of(model, batch).backward()
        separate.append(grads(model))
    model.zero_grad()
    before = copy.deepcopy(model.state_dict())
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    wrapper.initialize_count_status(model, 0, 2)
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        with wrapper.optim_context(model):
            loss = loss_of(model, batch)
        wrapper.update_params(loss)
        if seed == 0:
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for name, value in model.named_parameters():
        if name.startswith('gates.'):
            mean = (separate[0][name] + separate[1][name]) / 2
            assert torch.allclose(value, before[name] - 0.1 * mean, atol=1e-6), name
            assert name.endswith('norm.bias') or not torch.equal(value, before[name]), name


def test_ema():
    model = train(make(18, gate=GATES['bn']))
    model(images())
    ema = ExponentialMovingAverage(model, momentum=0.25, update_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema.update_parameters(model)
    start = model.gates.of('layer3.0.conv1').fc2.bias.detach().clone()
    loss_of(model, images()).backward()
    optimizer.step()
    ema.update_parameters(model)
    mine = model.gates.of('layer3.0.conv1').fc2.bias
    averaged = ema.module.gates.of('layer3.0.conv1')
    assert not torch.equal(mine, start)
    assert torch.allclose(averaged.fc2.bias, 0.75 * start + 0.25 * mine, atol=1e-6)
    record = model.gates.of('layer3.0.conv1').record
    with torch.no_grad():
        ema.module.eval()
        ema.module(images())
    assert averaged.record is not None and model.gates.of('layer3.0.conv1').record is record


def test_records_hold_no_graph_after_the_step_and_memory_does_not_grow():
    shallow = dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(1,))
    model = train(make(18, gate=GATES['bn'], **shallow))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = images(8)

    def steps(count):
        for _ in range(count):
            loss = loss_of(model, x) + sum(
                gate.record.probs.mean() for gate in find_gates(model).values()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for gate in find_gates(model).values():
                assert gate.record.logits.grad_fn is None and gate.record.probs.grad_fn is None
        del loss
        gc.collect()
        tensors = sum(isinstance(obj, torch.Tensor) for obj in gc.get_objects())
        return tensors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    tensors, peak = steps(20)
    tensors_after, peak_after = steps(180)
    assert tensors_after == tensors
    # A step's activations are about 10 MB: keeping them would be 1.8 GB.
    assert peak_after - peak < 30 * 1024


def test_save_load_copy_and_pickle_after_a_step(tmp_path):
    model = train(make(50))
    loss_of(model, images()).backward()
    model.eval()
    with torch.no_grad():
        expected = model(images())[-1]
    torch.save(model.state_dict(), tmp_path / 'weights.pth')
    loaded = make(50, seed=1)
    loaded.load_state_dict(torch.load(tmp_path / 'weights.pth', weights_only=True))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        loaded,
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for other in copies:
        with torch.no_grad():
            assert torch.equal(train(other, False)(images())[-1], expected)
        loss_of(train(other), images()).backward()
        assert_gates_have_gradients(other)


def test_copying_between_forward_and_backward():
    """Records with a graph cannot be copied; copies start without."""
    model = train(make(18))
    loss = loss_of(model, images())
    other = copy.deepcopy(model)
    assert all(gate.record is None for gate in find_gates(other).values())
    loss.backward()
    assert_gates_have_gradients(model)
