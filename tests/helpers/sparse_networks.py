# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Small gated networks of every family, with gates that depend on the picture."""

import torch
import torch.nn as nn
from mmengine.registry import MODELS

import fgc_mm  # noqa: F401
from fgc_mm.gates import find_gates

FAMILIES = {
    'cifar': dict(type='GatedResNetCifar', depth=20, base_channels=8),
    'wide': dict(type='GatedWideResNet', depth=10, widen_factor=1),
    'mobilenet': dict(type='GatedMobileNetV2', widen_factor=0.35, stem_stride=1),
    'basic': dict(type='GatedResNet', depth=18, base_channels=8),
    'bottleneck': dict(
        type='GatedResNetV1d',
        depth=50,
        base_channels=8,
        num_stages=2,
        strides=(1, 2),
        dilations=(1, 2),
        out_indices=(0, 1),
    ),
    'fbs': dict(type='GatedResNet', depth=18, base_channels=8, gate=dict(type='FBSGate')),
}


def build(family='basic', **options):
    """A network in evaluation mode whose norms and gates do something."""
    torch.manual_seed(0)
    model = MODELS.build(dict(FAMILIES[family], **options)).eval()
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


def pictures(batch=8, size=(32, 32)):
    """Pictures of different contrast and color: their gates differ."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.linspace(0.3, 3, batch)[:, None, None, None]
    color = 2 * torch.randn(batch, 3, 1, 1, generator=generator)
    return torch.randn(batch, 3, *size, generator=generator) * scale + color


def assert_equal_outputs(outs, wanted):
    """Equal up to a relative difference of 1e-4."""
    assert len(outs) == len(wanted)
    for out, want in zip(outs, wanted, strict=True):
        assert out.shape == want.shape
        assert (out - want).abs().max() <= 1e-4 * want.abs().max()
