# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Int8 networks: smaller, close to float32, with gates that decide as before."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn as nn
import torchvision

import fgc_mm
from fgc_mm.gates import find_gates
from fgc_mm.inference import GateUsage, Picture, export, slim
from fgc_mm.inference.export_int8 import quantized

pytestmark = pytest.mark.usefixtures('without_gradients')


def pictures(number, size=(64, 64)):
    generator = torch.Generator().manual_seed(number)
    scale = torch.linspace(0.3, 3, number)[:, None, None, None]
    color = torch.randn(number, 3, 1, 1, generator=generator)
    x = torch.randn(number, 3, *size, generator=generator) * scale + color
    return [Picture(one, one) for one in x.split(1)]


def network(gate=None):
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=10).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2)
    fgc_mm.gate(net, torch.rand(1, 3, 64, 64), gate)
    for gate in find_gates(net).values():
        if hasattr(gate, 'mask'):
            gate.mask[::2] = 0
        else:
            nn.init.normal_(gate.fc2.weight)
            nn.init.zeros_(gate.fc2.bias)
    return net.eval()


def in_onnxruntime(content):
    session = onnxruntime.InferenceSession(content, providers=['CPUExecutionProvider'])
    return lambda x: session.run(None, {'image': x})[0]


def ops(content):
    return [node.op_type for node in onnx.load_from_string(content).graph.node]


def test_half_the_channels_and_int8():
    net = network(dict(type='StaticGate'))
    usage = GateUsage(net)
    usage.attach()
    net(torch.rand(1, 3, 64, 64))
    usage.detach()
    small = slim(net, usage.shares()).model
    checked, ranges = pictures(6), pictures(8)
    dense = export(net, checked)
    slimmed = export(small, checked)
    result = export(small, checked, calibration=ranges)
    assert len(result.content) < 0.3 * len(slimmed.content)
    assert len(slimmed.content) < 0.8 * len(dense.content)
    assert 'DequantizeLinear' in ops(result.content)
    assert result.metadata['precision'] == 'int8' and slimmed.metadata['precision'] == 'float32'
    assert 0 < result.int8['feature_0'] < 0.1 and not slimmed.int8
    # A batch, at a size that nobody calibrated for.
    x = torch.cat([p.ready for p in pictures(3, (48, 96))])
    wanted = net(x).numpy()
    out = in_onnxruntime(result.content)(x.numpy())
    assert np.linalg.norm(out - wanted) < 0.1 * np.linalg.norm(wanted)
    np.testing.assert_allclose(in_onnxruntime(slimmed.content)(x.numpy()), wanted, atol=1e-3)


def test_gates_stay_in_float32():
    net = network()
    result = export(net, pictures(6), calibration=pictures(8), with_gates=True)
    found = ops(result.content)
    assert found.count('LayerNormalization') == found.count('Greater') == len(find_gates(net))
    x = torch.cat([p.ready for p in pictures(6)])
    net(x)
    wanted = [gate.record.mask for gate in find_gates(net).values()]
    session = onnxruntime.InferenceSession(result.content, providers=['CPUExecutionProvider'])
    _, *masks = session.run(None, {'image': x.numpy()})
    pairs = zip(map(torch.from_numpy, masks), wanted, strict=True)
    same = [float((mask == want).float().mean()) for mask, want in pairs]
    assert np.mean(same) > 0.95
    # What feeds a gate's layers is no int8 map.
    graph = onnx.load_from_string(result.content).graph
    names = {gate.rpartition('.')[2] for gate in find_gates(net)}
    for node in graph.node:
        if names & set(node.name.split('/')):
            assert 'Linear' not in node.op_type


def test_what_cannot_be_quantized(monkeypatch):
    net, x = network(), pictures(2)
    with pytest.raises(ValueError, match="--int8 needs --format onnx, and this is 'torchscript'"):
        export(net, x, file_format='torchscript', calibration=x)
    with pytest.raises(ValueError, match='--int8 needs --opset 13 or newer, and this is 12'):
        export(net, x, opset=12, calibration=x)
    with pytest.raises(ValueError, match='at least one picture to calibrate on'):
        export(net, x, fixed_size=True, calibration=pictures(2, (32, 32)))
    # Ranges of pictures that are nothing like those of the check.
    tiny = [Picture(p.raw * 1e-3, p.ready * 1e-3) for p in x]
    with pytest.raises(ValueError, match=r"int8 .* fails the check: on 2 .*'feature_0' differs"):
        export(network(dict(type='StaticGate')), x, calibration=tiny)


def test_the_network_in_float32_is_left_alone():
    model = onnx.load_from_string(export(network(), pictures(2)).content)
    before = model.SerializeToString()
    quantized(model, [p.ready for p in pictures(2)])
    assert model.SerializeToString() == before
