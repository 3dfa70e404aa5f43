# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sparse execution gives what masked execution gives."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn
from sparse_networks import FAMILIES, assert_equal_outputs, build, pictures

from fgc_mm.gates import find_gates, force_gates
from fgc_mm.inference import disable_sparse, enable_sparse, is_sparse, kernels
from fgc_mm.macs import count_macs

pytestmark = pytest.mark.usefixtures('without_gradients')
families = pytest.mark.parametrize('family', FAMILIES)


def masks_of(model):
    return {name: gate.record.mask for name, gate in find_gates(model).items()}


@families
@pytest.mark.parametrize('batch', [1, 8])
@pytest.mark.parametrize(
    ('way', 'granularity'),
    [
        ('auto', 8),
        ('auto', 1),
        ('groups', 1),
        ('groups', 4),
        ('union', 1),
        ('union', 4),
        ('dense', 1),
    ],
)
def test_outputs_and_records_are_those_of_masked_execution(family, batch, way, granularity):
    model = build(family)
    x = pictures(batch, (40, 24))
    wanted = model(x)
    masks = masks_of(model)
    together = torch.cat(list(masks.values()), dim=1)
    assert 0.2 < together.mean() < 0.8
    assert batch == 1 or len(together.unique(dim=0)) > 1
    enable_sparse(model, way=way, granularity=granularity)
    assert is_sparse(model)
    assert_equal_outputs(model(x), wanted)
    for name, mask in masks_of(model).items():
        assert torch.equal(mask, masks[name]), name
    disable_sparse(model)
    assert not is_sparse(model)
    for out, want in zip(model(x), wanted, strict=True):
        assert torch.equal(out, want)


@families
@pytest.mark.parametrize('channels_last', [True, False])
def test_all_closed_one_open_all_open(family, channels_last):
    model = build(family)
    x = pictures(2)
    gates = find_gates(model)
    one = {
        name: nn.functional.one_hot(torch.tensor([1, 3]), g.channels) for name, g in gates.items()
    }
    for forced in (0.0, 1.0, 0.5, one):
        with force_gates(model, forced):
            wanted = disable_sparse(model)(x)
            for granularity in (1, 4):
                enable_sparse(model, channels_last, granularity, 'groups')
                assert_equal_outputs(model(x), wanted)


@pytest.mark.parametrize('family', ['bottleneck', 'mobilenet'])
def test_granularity(family):
    model = build(family)
    x = pictures(2)
    wanted = model(x)
    widths = []

    def note(module, args, out):
        widths.append(out.size(1))

    enable_sparse(model, granularity=4, way='groups')
    model(x)
    blocks = [m for m in model.modules() if getattr(m, 'runner', None) is not None]
    produced = blocks[1].get_submodule(blocks[1].gate_sites()[0].produces[0])
    produced.register_forward_hook(note)
    assert_equal_outputs(model(x), wanted)
    assert widths and all(width % 4 == 0 for width in widths)


@families
def test_closed_channels_are_not_computed(family):
    model = build(family)
    x = pictures(1)
    model(x)
    sizes = {}
    for name, block in model.named_modules():
        for site in getattr(block, 'gate_sites', list)():
            conv = block.get_submodule(site.produces[0])
            conv.register_forward_hook(
                lambda module, args, out, key=f'{name}.{site.gate}': sizes.update(
                    {key: out.size(1)}
                )
            )
    enable_sparse(model, granularity=1, way='groups')(x)
    masks = masks_of(model)
    assert list(sizes) == list(masks)
    for name, mask in masks.items():
        assert sizes[name] == int(mask.sum()), name


def test_sizes_and_batches_may_change_from_pass_to_pass():
    dense, model = build(), enable_sparse(build())
    for batch, size in ((1, (32, 32)), (3, (64, 48)), (1, (33, 57)), (2, (32, 32))):
        x = pictures(batch, size)
        assert_equal_outputs(model(x), dense(x))


def count_kernels(monkeypatch):
    calls = []
    for name in ('convolve', 'accumulate', 'convolve_turned'):

        def counting(conv, x, weight, *others, run=getattr(kernels, name)):
            calls.append(weight.is_mkldnn)
            return run(conv, x, weight, *others)

        monkeypatch.setattr(kernels, name, counting)
    return calls


def test_whole_layers_run_with_packed_weights(monkeypatch):
    dense, model = build(), enable_sparse(build(), way='dense')
    calls = count_kernels(monkeypatch)
    for size in ((64, 64), (33, 57)):
        x = pictures(1, size)
        assert_equal_outputs(model(x), dense(x))
    layers = sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert len(calls) == (0 if kernels._CONVOLVE is None else 2 * layers)  # a build without oneDNN
    assert all(calls)


@pytest.mark.parametrize('why', ['hooks', 'autocast', 'no_operator', 'alone'])
def test_without_kernels(monkeypatch, why):
    """Where they cannot be used the result is the same."""
    dense, model = build(), enable_sparse(build(), way='dense')
    x = pictures(2)
    model(x)
    wanted = dense(x)
    calls = count_kernels(monkeypatch)
    if why == 'hooks':
        model.layer1[0].register_forward_hook(lambda *_: None)
    elif why == 'no_operator':
        monkeypatch.setattr(kernels, '_CONVOLVE', None)
    if why == 'alone':
        maps = torch.rand(1, model.layer1[0].conv1.in_channels, 16, 16)
        assert_equal_outputs([model.layer1[0](maps)], [dense.layer1[0](maps)])
    elif why == 'autocast':
        with torch.autocast('cpu', torch.bfloat16):
            model(x)
    else:
        assert_equal_outputs(model(x), wanted)
    assert not calls


def test_a_pass_that_fails_leaves_nothing_behind():
    model = enable_sparse(build())
    x = pictures(1)
    model(x)
    with pytest.raises(RuntimeError):
        model(torch.rand(1, 5, 32, 32))
    model.layer3[0].conv2.weight.data.mul_(1.5)
    alone = torch.rand(1, model.layer3[0].conv1.in_channels, 8, 8)
    wanted = copy.deepcopy(disable_sparse(copy.deepcopy(model))).layer3[0](alone)
    assert_equal_outputs([model.layer3[0](alone)], [wanted])


def test_an_ungated_block_and_conv_are_folded_too(monkeypatch):
    options = dict(gated_blocks=['layer2'], gated_convs=['conv2'])
    model = build('bottleneck', **options)
    x = pictures(2)
    wanted = model(x)
    enable_sparse(model, way='groups')
    calls, batch_norm = [], nn.functional.batch_norm

    def counted(x, *args, **kwargs):
        calls.append(1)
        return batch_norm(x, *args, **kwargs)

    monkeypatch.setattr(nn.functional, 'batch_norm', counted)
    assert_equal_outputs(model(x), wanted)
    assert not calls  # norms of stem and shortcuts hand on what they get
    disable_sparse(model)(x)
    assert calls


def test_a_batch_without_images():
    model = enable_sparse(build())
    for out in model(pictures(1)[:0]):
        assert out.size(0) == 0


def test_large_maps(monkeypatch):
    """Other ways of computing begin at a size."""
    monkeypatch.setattr('fgc_mm.inference.convolution.PRODUCT_POSITIONS', 64)
    monkeypatch.setattr('fgc_mm.inference.gate_bundle._FEW', 256)
    for family in ('bottleneck', 'basic'):
        dense, model = build(family), enable_sparse(build(family), way='groups')
        x = pictures(1, (96, 64))
        assert_equal_outputs(model(x), dense(x))


def test_training_and_gradients_take_the_masked_path():
    masked, sparse = build(), enable_sparse(build())
    x = pictures(4)
    sparse(x)
    with torch.enable_grad():
        for model in (masked, sparse):
            model.train()
            torch.manual_seed(0)
            sum(out.square().mean() for out in model(x)).backward()
        grads = dict(masked.named_parameters())
        for name, param in sparse.named_parameters():
            assert torch.equal(param.grad, grads[name].grad), name
        sparse.eval()
        masked.eval()
        for out, want in zip(sparse(x), masked(x), strict=True):
            assert out.requires_grad and torch.equal(out, want)
    for gate in find_gates(sparse).values():
        assert gate.record.feature is not None
    assert_equal_outputs(sparse(x), masked(x))  # with the weights and statistics of now
    for gate in find_gates(sparse).values():
        assert gate.record.feature is None


def test_copies_and_pickles_are_sparse():
    model = enable_sparse(build('mobilenet'), way='groups')
    x = pictures(2)
    wanted = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_sparse(other)
        own = {id(module) for module in other.modules()}
        for module in other.modules():
            runner = getattr(module, 'runner', None)
            assert runner is None or id(runner.block) in own
        assert_equal_outputs(other(x), wanted)
        for param in other.parameters():
            param.mul_(0.9)
        assert any((a - b).abs().max() > 1e-3 for a, b in zip(other(x), wanted, strict=True))
        assert not is_sparse(disable_sparse(other))
    assert_equal_outputs(model(x), wanted)


@families
def test_macs_are_counted_with_the_fast_kernels(family, monkeypatch):
    model, x = enable_sparse(build(family)), pictures(2)
    model(x)  # from now on the planner knows the sizes of maps
    calls = count_kernels(monkeypatch)
    model(x)
    uncounted = len(calls)
    counted = count_macs(model, x)
    assert len(calls) == 2 * uncounted  # whoever counts does not slow it down
    wanted = count_macs(disable_sparse(model), x)
    for a, b in zip(counted, wanted, strict=True):
        assert a.backbone_executed == pytest.approx(b.backbone_executed)


@families
def test_macs_are_counted_alike(family):
    model = build(family)
    x = pictures(3)
    wanted = count_macs(model, x)
    for way in ('groups', 'union', 'auto'):
        counted = count_macs(enable_sparse(model, way=way), x)
        for image, want in zip(counted, wanted, strict=True):
            # Parts of a batch are added up in another order.
            assert image.model_dense == pytest.approx(want.model_dense, rel=1e-12)
            assert image.model_executed == pytest.approx(want.model_executed, rel=1e-12)
            assert image.decisions == want.decisions


def test_layout_is_that_of_the_input():
    model = enable_sparse(build())
    for layout in (torch.contiguous_format, torch.channels_last):
        for out in model(pictures(2).contiguous(memory_format=layout)):
            assert out.is_contiguous(memory_format=layout)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_other_types(dtype):
    model = build().to(dtype)
    x = pictures(2).to(dtype)
    wanted = model(x)
    limit = 0.05 if dtype == torch.bfloat16 else 1e-9
    with force_gates(model, masks_of(model)):
        for out, want in zip(enable_sparse(model, way='groups')(x), wanted, strict=True):
            assert out.dtype == dtype
            assert (out - want).abs().max() <= limit * want.abs().max()


def test_autocast():
    model = build()
    x = pictures(2)
    with torch.autocast('cpu', torch.bfloat16):
        wanted = model(x)
        with force_gates(model, masks_of(model)):
            for out, want in zip(enable_sparse(model, way='groups')(x), wanted, strict=True):
                assert out.dtype == want.dtype
                assert (out - want).abs().max() <= 0.05 * want.abs().max()


def test_a_block_that_cannot_be_gathered_stays_masked(monkeypatch):
    said = []
    monkeypatch.setattr('fgc_mm.inference.sparse.print_log', lambda text, **_: said.append(text))
    norm = dict(type='GN', num_groups=4)
    model = build(norm_cfg=norm)
    x = pictures(2)
    wanted = model(x)
    enable_sparse(model)
    assert not is_sparse(model)
    assert 'layer1.0 stays masked, gn1 is a GroupNorm' in said[0]
    assert_equal_outputs(model(x), wanted)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(granularity=0), 'granularity=0 must be'),
        (dict(way='fast'), "way='fast' must be one of"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        enable_sparse(build(), **options)


def test_a_network_without_gates_is_refused():
    with pytest.raises(ValueError, match='GatedResNet has no gates'):
        enable_sparse(build(gate=None))


@pytest.mark.skipif(not torch.cuda.is_available(), reason='requires CUDA')
@families
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('channels_last', [True, False])
def test_on_a_gpu(family, dtype, channels_last):
    model = build(family).cuda().to(dtype)
    x = pictures(4).cuda().to(dtype)
    wanted = model(x)
    limit = 1e-2 if dtype == torch.float16 else 1e-3  # TF32 convolutions
    with force_gates(model, masks_of(model)):
        for granularity in (1, 8):
            for way in ('groups', 'union'):
                enable_sparse(model, channels_last, granularity, way)
                for out, want in zip(model(x), wanted, strict=True):
                    assert out.is_cuda and out.dtype == dtype
                    assert (out - want).abs().max() <= limit * want.abs().max()
