# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Hooks and patches of others on single modules have the effect they have in masked execution."""

import pytest
import torch
import torch.nn as nn
from sparse_networks import assert_equal_outputs, build, pictures

from fgc_mm.inference import disable_sparse, enable_sparse, is_sparse

pytestmark = pytest.mark.usefixtures('without_gradients')

NORMS = ['bn1', 'layer1.0.bn1', 'layer2.0.bn2', 'layer2.0.downsample.1', 'layer3.1.bn2']


def differs(outs, others):
    pairs = zip(outs, others, strict=True)
    return any((a - b).abs().max() > 1e-3 * b.abs().max() for a, b in pairs)


@pytest.mark.parametrize('name', NORMS)
@pytest.mark.parametrize('kind', ['after', 'before'])
@pytest.mark.parametrize('once', [False, True])
def test_hooks_on_norms(name, kind, once):
    masked, sparse = build(), enable_sparse(build())
    x = pictures(2)
    plain = sparse(x)
    seen = []
    for model in (masked, sparse):
        norm, handles = model.get_submodule(name), []

        def hook(module, args, out=None, handles=handles):
            seen.append(args[0].clone())
            if once:
                handles.pop().remove()
            return args[0].abs() if out is None else 2 * out

        put = norm.register_forward_hook if kind == 'after' else norm.register_forward_pre_hook
        handles.append(put(hook))
    wanted = masked(x)
    assert_equal_outputs(sparse(x), wanted)
    assert len(seen) == 2 and differs(wanted, plain)
    assert_equal_outputs(seen[1:], seen[:1])
    if once:
        assert_equal_outputs(sparse(x), plain)


@pytest.mark.parametrize('name', ['layer2.0', 'layer3.1'])
def test_a_block_on_its_own_with_a_watched_norm(name):
    masked, sparse = build(), enable_sparse(build())
    sparse(pictures(1))
    calls = []
    blocks = [model.get_submodule(name) for model in (masked, sparse)]
    for block in blocks:
        block.bn1.register_forward_hook(lambda *_: calls.append(1))
        if block.downsample is not None:
            block.downsample[1].register_forward_hook(lambda m, args, out: out + 1)
    x = torch.randn(2, blocks[0].conv1.in_channels, 8, 8)
    wanted, own = (block(x) for block in blocks)
    assert_equal_outputs([own], [wanted])
    assert len(calls) == 2


def twice(module, method='forward'):
    usual = getattr(type(module), method)
    return lambda *args: 2 * usual(module, *args)


def all_open(gate):
    def decide(pooled):
        multiplier, record = type(gate).decide(gate, pooled)
        record.mask = torch.ones_like(multiplier)
        return record.mask, record

    return decide


PATCHES = [
    ('bn1', 'forward', twice),
    ('relu', 'forward', twice),
    ('conv1', 'forward', twice),
    ('layer1.0.bn1', 'forward', twice),
    ('layer1.0.bn2', 'forward', twice),
    ('layer2.0.downsample.1', 'forward', twice),
    ('layer2.0.conv2', 'forward', twice),
    ('layer2.1.relu', 'forward', twice),
    ('layer1.1.gate1', 'decide', all_open),
    ('layer1.1.gate1.fc1', 'forward', lambda layer: lambda x: -nn.Linear.forward(layer, x)),
    ('layer1.1.gate1.fc2', 'forward', lambda layer: lambda x: -nn.Linear.forward(layer, x)),
    ('layer1.1.gate1.norm', 'forward', lambda norm: lambda x: -nn.BatchNorm1d.forward(norm, x)),
    ('layer1.1', 'decide', lambda block: lambda x: type(block).decide(block, -x)),
]


@pytest.mark.parametrize('when', ['before', 'unused', 'after'])
@pytest.mark.parametrize(
    'name,method,make', PATCHES, ids=[f'{name}.{method}' for name, method, _ in PATCHES]
)
def test_patched_modules(name, method, make, when):
    masked, sparse = build(), build()
    x = pictures(2)
    plain = masked(x)
    if when != 'before':
        enable_sparse(sparse)
    if when == 'after':
        sparse(x)
        sparse(x)
    for model in (masked, sparse):
        module = model.get_submodule(name)
        patch = make(module)
        setattr(module, method, patch)
    if when == 'before':
        enable_sparse(sparse)
    wanted = masked(x)
    assert differs(wanted, plain)
    for _ in range(2):
        assert_equal_outputs(sparse(x), wanted)
    assert is_sparse(sparse)
    disable_sparse(sparse)
    assert module.__dict__[method] is patch
    assert_equal_outputs(sparse(x), wanted)


def test_a_patched_backbone():
    model, x = build(), pictures(2)
    plain = model(x)
    usual = type(model).forward
    patch = model.forward = lambda x: tuple(2 * out for out in usual(model, x))
    wanted = model(x)
    assert_equal_outputs(enable_sparse(model)(x), wanted)
    assert_equal_outputs(disable_sparse(model)(x), wanted)
    assert model.forward is patch
    # One that calls what was there before, and outlives it.
    model = enable_sparse(build())
    inner = model.forward
    model.forward = patch = lambda x: tuple(2 * out for out in inner(x))
    assert_equal_outputs(model(x), [2 * out for out in plain])
    model.layer1[0].bn1.forward = twice(model.layer1[0].bn1)
    model(x)
    assert model.forward is patch
    del model.layer1[0].bn1.forward
    assert_equal_outputs(disable_sparse(model)(x), [2 * out for out in plain])
