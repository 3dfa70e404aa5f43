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
import torchvision
from mmengine.registry import MODELS

import fgc_mm
from fgc_mm.gates import find_gates
from fgc_mm.inference import GateUsage, Picture, export, slim
from fgc_mm.inference.export_formats import can_torch_export
from fgc_mm.inference.export_parts import matrix_pool

RESNET = dict(type='mmdet.ResNet', depth=18, base_channels=8)
ARCH = dict(depths=[1, 1, 1, 1], channels=[8, 16, 24, 32])
NETWORKS = {
    'basic': dict(type='Gated', backbone=RESNET),
    'fbs': dict(type='Gated', backbone=RESNET, gate=dict(type='FBSGate')),
    # Slices of a concatenation, and channels that follow another order.
    'csp': dict(
        type='Gated',
        backbone=dict(
            type='mmdet.CSPNeXt',
            arch_ovewrite=[[64, 128, 1, True, False], [128, 256, 1, False, False]],
            widen_factor=0.25,
            out_indices=(1, 2),
        ),
    ),
    'convnext': dict(type='Gated', backbone=dict(type='mmpretrain.ConvNeXt', arch=ARCH)),
}
SIZES = [(64, 64), (40, 72)]


def build(name='basic', **options):
    """A network in evaluation mode whose norms and gates do something."""
    torch.manual_seed(0)
    model = MODELS.build({**NETWORKS[name], **options})
    model.eval()
    return varied(model)


def varied(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.5)
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    for gate in find_gates(model).values():
        if hasattr(gate, 'fc2'):
            nn.init.normal_(gate.fc2.weight)
            nn.init.zeros_(gate.fc2.bias)
    return model


def pictures(batch=8, size=(48, 48)):
    """Pictures of different contrast and color: their gates differ."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.linspace(0.3, 3, batch)[:, None, None, None]
    color = 2 * torch.randn(batch, 3, 1, 1, generator=generator)
    return torch.randn(batch, 3, *size, generator=generator) * scale + color


@pytest.fixture(autouse=True)
def without_gradients():
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


@pytest.mark.parametrize('name', NETWORKS)
def test_onnx_with_gates_for_two_sizes_and_batches(name):
    model = build(name)
    result = export(model, as_pictures(*pictures(8)[::4].split(1)), with_gates=True)
    assert result.max_difference <= 1e-3
    assert list(result.checks) == [
        'picture 1 (48x48)',
        'picture 2 (48x48)',
        'a batch of 2',
        'another size (36x60)',
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


def test_torchscript():
    model = build('csp')
    result = export(model, as_pictures(pictures(1)), file_format='torchscript')
    loaded = torch.jit.load(io.BytesIO(result.content))
    assert_same(loaded, model, [1, 3])
    extra = {'metadata.json': ''}
    torch.jit.load(io.BytesIO(result.content), _extra_files=extra)
    assert json.loads(extra['metadata.json'])['gates'] == str(len(find_gates(model)))


def test_slimmed_and_plain_networks():
    """With fewer gates or none, and a network of no OpenMMLab package."""
    model = build('basic')
    x = pictures(4)
    usage = GateUsage(model)
    usage.attach()
    model(x)
    usage.detach()
    for smaller in (slim(model, usage.shares()).model, build('basic', gate=None)):
        result = export(smaller, as_pictures(x[:1]))
        session = session_of(result.content)
        assert_same(lambda x, run=session.run: run(None, {'image': x.numpy()}), smaller, [2])
    assert result.metadata['gates'] == '0'
    net = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1] * 4, num_classes=5)
    net = varied(fgc_mm.gate(net, x[:1])).eval()
    result = export(net, as_pictures(x[:1]), with_gates=True)
    assert list(result.outputs) == ['feature_0', *(f'gate.{name}' for name in find_gates(net))]
    session = session_of(result.content)
    out = session.run(['feature_0'], {'image': x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(out), net(x), rtol=1e-3, atol=1e-3)


def test_torch_export(caplog):
    caplog.set_level(logging.WARNING, 'torch.__trace')  # thousands of lines
    small = dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1))
    model = build('basic', backbone={**RESNET, **small})
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
    assert list(result.checks) == ['picture 1 (48x48)', 'a batch of 2']
    session = session_of(result.content)
    assert session.get_inputs()[0].shape == ['batch', 3, 48, 48]
    with pytest.raises(Exception, match='Got invalid dimensions'):
        session.run(None, {'image': pictures(1, (40, 40)).numpy()})


def test_model_is_as_before():
    model = build()
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export(model, as_pictures(pictures(1)))
    assert model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    model.eval()
    assert model(pictures(1))[0].isfinite().all()


def test_metadata_and_size_of_the_computation():
    result = export(build(), as_pictures(pictures(2)[:1]), metadata=dict(classes=['a', 'b']))
    props = {prop.key: prop.value for prop in onnx.load_from_string(result.content).metadata_props}
    assert props == result.metadata
    assert json.loads(props['classes']) == ['a', 'b']
    assert props['part'] == 'backbone' and props['gates'] == '8'
    assert 0 < int(props['macs_backbone_executed']) < int(props['macs_backbone_dense'])
    assert float(props['max_difference']) == result.max_difference


@pytest.mark.parametrize('cells', [1, 2, 6, (3, 5), (None, 4), (4, None)])
@pytest.mark.parametrize('size', [(6, 6), (7, 13), (2, 3), (16, 9)])
def test_adaptive_pooling_as_a_product(cells, size):
    pool = nn.AdaptiveAvgPool2d(cells)
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(matrix_pool(cells, x), pool(x))


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
    with pytest.raises(ValueError, match='at least one picture'):
        export(build(), [])
    for option, message in {
        'part': r"part='other' must be one of \('model', 'backbone'\)",
        'file_format': "file_format='other' must be one of onnx, torchscript, torch_export",
    }.items():
        with pytest.raises(ValueError, match=message):
            export(build(), x, **{option: 'other'})
    with pytest.raises(ValueError, match='opset 999 must be within 7 and 20'):
        export(build(), x, opset=999)
    monkeypatch.setitem(sys.modules, 'onnxruntime', None)
    with pytest.raises(ImportError, match='needs the package onnxruntime'):
        export(build(), x)
    assert export(build(), x, file_format='torchscript').max_difference <= 1e-3
