# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Exported networks compute what PyTorch computes."""

import io
import json
import logging
import sys

import onnx
import onnxruntime
import pytest
import torch
import torch.nn as nn
from sparse_networks import build, pictures

from fgc_mm.gates import find_gates
from fgc_mm.inference import Picture, export
from fgc_mm.inference.export_block import MatrixPool
from fgc_mm.inference.export_formats import can_torch_export

FAMILIES = ['basic', 'bottleneck', 'cifar', 'wide', 'mobilenet', 'fbs']
SIZES = [(64, 64), (40, 72)]


@pytest.fixture(autouse=True)
def without_gradients():
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


def as_pictures(*tensors):
    """Pictures that need no preprocessing."""
    return [Picture(x, x) for x in tensors]


def session_of(content):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(content, options, ['CPUExecutionProvider'])


def assert_same(run, model, batches, sizes=SIZES):
    """The exported network gives the model's outputs, at all batches and sizes."""
    for batch in batches:
        for size in sizes:
            x = pictures(8, size)[3 : 3 + batch]
            for out, want in zip(run(x), model(x), strict=True):
                assert out.shape == want.shape
                assert (torch.as_tensor(out) - want).abs().max() <= 1e-3


@pytest.mark.parametrize('family', FAMILIES)
def test_onnx_with_gates_for_two_sizes_and_batches(family):
    model = build(family)
    result = export(model, as_pictures(*pictures(8)[::4].split(1)), with_gates=True)
    assert result.max_difference <= 1e-3
    assert list(result.checks) == [
        'picture 1 (32x32)',
        'picture 2 (32x32)',
        'a batch of 2',
        'another size (24x40)',
    ]
    session = session_of(result.content)
    names = [out.name for out in session.get_outputs()]
    features = [name for name in names if name.startswith('feature_')]
    assert names == [*features, *(f'gate.{name}' for name in find_gates(model))]
    assert_same(lambda x: session.run(features, {'image': x.numpy()}), model, [1, 3])
    x = pictures(4, (48, 40))
    model(x)
    differ = 0
    for name, gate in find_gates(model).items():
        (mask,) = session.run([f'gate.{name}'], {'image': x.numpy()})
        assert torch.equal(torch.from_numpy(mask), gate.record.mask)
        differ += int((mask != mask[:1]).any())
    assert differ  # the gates are in the graph and look at the picture


@pytest.mark.parametrize('family', FAMILIES)
def test_gathered_form_convolves_with_weights_that_change(family):
    model = build(family)
    result = export(model, as_pictures(pictures(1)), form='gathered')
    assert 'single images only (batch 1)' in result.notices
    session = session_of(result.content)
    assert_same(lambda x: session.run(None, {'image': x.numpy()}), model, [1])
    graph = onnx.load_from_string(result.content).graph
    made = {out for node in graph.node if node.op_type != 'Constant' for out in node.output}
    dynamic = [node for node in graph.node if node.op_type == 'Conv' and node.input[1] in made]
    sites = [site for block in model.modules() for site in getattr(block, '_sites', [])]
    depthwise = [name for site in sites for name in site.produces if name in site.consumes]
    around = {(id(site), name) for site in sites for name in (*site.produces, *site.consumes)}
    shared = sum(len(getattr(block, '_sites', [])) == 2 for block in model.modules())
    assert len(dynamic) == len(around) - shared - len(depthwise)


@pytest.mark.parametrize('family', ['basic', 'mobilenet'])
@pytest.mark.parametrize('count', [0, 1, None])
def test_gathered_form_with_none_one_and_all_open(family, count):
    model = build(family)
    for gate in find_gates(model).values():
        nn.init.zeros_(gate.fc2.weight)
        nn.init.constant_(gate.fc2.bias, -5)
        gate.fc2.bias[1 : None if count is None else 1 + count] = 5
        if count is None:
            gate.fc2.bias[0] = 5
    result = export(model, as_pictures(pictures(1)), form='gathered')
    session = session_of(result.content)
    assert_same(lambda x: session.run(None, {'image': x.numpy()}), model, [1], SIZES[:1])


@pytest.mark.parametrize('family', ['basic', 'bottleneck', 'mobilenet'])
@pytest.mark.parametrize('form', ['masked', 'gathered'])
def test_torchscript(family, form):
    model = build(family)
    result = export(model, as_pictures(pictures(1)), file_format='torchscript', form=form)
    loaded = torch.jit.load(io.BytesIO(result.content))
    assert_same(loaded, model, [1] if form == 'gathered' else [1, 3])
    extra = {'metadata.json': ''}
    torch.jit.load(io.BytesIO(result.content), _extra_files=extra)
    assert json.loads(extra['metadata.json'])['form'] == form


def test_torch_export(caplog):
    caplog.set_level(logging.WARNING, 'torch.__trace')  # thousands of lines
    model = build('basic', num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1))
    x = as_pictures(pictures(1, (64, 64)))
    if not can_torch_export():  # torch of the original line
        with pytest.raises(ValueError, match=r'torch_export.* needs torch >= 2\.6, and this is'):
            export(model, x, file_format='torch_export')
        return
    result = export(model, x, file_format='torch_export')
    loaded = torch.export.load(io.BytesIO(result.content)).module()
    assert_same(loaded, model, [1, 3])


def test_fixed_size():
    model = build()
    result = export(model, as_pictures(pictures(1), pictures(1, (40, 40))), fixed_size=True)
    assert list(result.checks) == ['picture 1 (32x32)', 'a batch of 2']
    session = session_of(result.content)
    assert session.get_inputs()[0].shape == ['batch', 3, 32, 32]
    with pytest.raises(Exception, match='Got invalid dimensions'):
        session.run(None, {'image': pictures(1, (40, 40)).numpy()})


def test_model_is_as_before():
    model = build().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export(model, as_pictures(pictures(1)), form='gathered')
    assert model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert model.eval()(pictures(1))[0].isfinite().all()


def test_metadata_and_size_of_the_computation():
    result = export(build(), as_pictures(pictures(2)[:1]), metadata=dict(classes=['a', 'b']))
    props = {prop.key: prop.value for prop in onnx.load_from_string(result.content).metadata_props}
    assert props == result.metadata
    assert json.loads(props['classes']) == ['a', 'b']
    assert props['part'] == 'backbone' and props['form'] == 'masked' and props['gates'] == '8'
    assert 0 < int(props['macs_backbone_executed']) < int(props['macs_backbone_dense'])
    assert float(props['max_difference']) == result.max_difference


@pytest.mark.parametrize('cells', [1, 2, 6, (3, 5), (None, 4), (4, None)])
@pytest.mark.parametrize('size', [(6, 6), (7, 13), (2, 3), (16, 9)])
def test_adaptive_pooling_as_a_product(cells, size):
    pool = nn.AdaptiveAvgPool2d(cells)
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(MatrixPool(pool)(x), pool(x))


class Branch(nn.Module):
    """Does something a recording cannot hold."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x):
        return self.first(x + 1 if x.mean() > 0 else x - 1)


def test_a_network_that_cannot_be_recorded_fails_the_check():
    model = build()
    model.conv1 = Branch(model.conv1)
    bright, dark = pictures(1).abs(), -pictures(1).abs()
    with pytest.raises(ValueError, match=r"fails the check: on picture 2 .* 'feature_0' differs"):
        export(model, as_pictures(bright, dark))
    model = build()
    model.conv1.register_forward_hook(lambda m, args, out: out / 0)
    with pytest.raises(ValueError, match=r'cannot be checked: on picture 1 .* nan or infinite'):
        export(model, as_pictures(pictures(1)))


def test_what_cannot_be_exported(monkeypatch):
    x = as_pictures(pictures(1))
    with pytest.raises(ValueError, match='the model GatedResNet has no gates'):
        export(build(gate=None), x)
    with pytest.raises(ValueError, match='at least one picture'):
        export(build(), [])
    for option, message in {
        'part': r"part='other' must be one of \('model', 'backbone'\)",
        'form': "form='other' must be one of masked, gathered",
        'file_format': "file_format='other' must be one of onnx, torchscript, torch_export",
    }.items():
        with pytest.raises(ValueError, match=message):
            export(build(), x, **{option: 'other'})
    refusal = "form='gathered' must be 'masked' for" if can_torch_export() else 'needs torch >= 2'
    with pytest.raises(ValueError, match=refusal):
        export(build(), x, file_format='torch_export', form='gathered')
    with pytest.raises(ValueError, match='no segmentor, classifier, nor detector'):
        export(nn.Sequential(build()), x)
    assert export(nn.Sequential(build()), x, part='backbone').max_difference <= 1e-3
    with pytest.raises(ValueError, match='opset 999 must be within 7 and 20'):
        export(build(), x, opset=999)
    monkeypatch.setitem(sys.modules, 'onnxruntime', None)
    with pytest.raises(ImportError, match='needs the package onnxruntime'):
        export(build(), x)
    assert export(build(), x, file_format='torchscript').max_difference <= 1e-3
