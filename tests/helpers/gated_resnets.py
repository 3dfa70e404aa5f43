# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Small gated ResNets, pictures and a loss for the tests of this folder."""

import torch
import torch.nn as nn
from mmengine.registry import MODELS

import fgc_mm  # noqa: F401
from fgc_mm.gates import find_gates

LAYER_NORM = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'), bias_init=0.5)
GATES = {
    'bn': dict(type='BinConcreteGate', bias_init=0.5),
    'ln': LAYER_NORM,
    'none': dict(type='BinConcreteGate', norm_cfg=None, bias_init=0.5),
    'fbs': dict(type='FBSGate', density=0.5),
}


def gated_resnet(depth=18, scope='mmdet', **kwargs):
    """A package's ResNet with gates, whose own norms learn."""
    return MODELS.build(
        dict(type=f'{scope}.GatedResNet', **{'depth': depth, 'norm_eval': False, **kwargs})
    )


def train(model, mode=True):
    """The model in a mode; upstream's own ``train`` returns nothing."""
    model.train(mode)
    return model


def make(depth=50, seed=0, **kwargs):
    torch.manual_seed(seed)
    model = gated_resnet(depth, **{'base_channels': 8, 'gate': LAYER_NORM, **kwargs})
    for module in model.modules():  # blocks that do something
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.5)
    for gate in find_gates(model).values():  # and gates that differ from image to image
        if hasattr(gate, 'fc2'):
            nn.init.normal_(gate.fc2.weight)
    return model


def images(batch=4, size=64):
    generator = torch.Generator().manual_seed(3)
    scale = torch.linspace(0.3, 3, batch)[:, None, None, None]
    return torch.randn(batch, 3, size, size, generator=generator) * scale


def loss_of(model, x):
    return sum(out.float().square().mean() for out in model(x))


def grads(model, only_gates=True):
    return {
        name: None if value.grad is None else value.grad.clone()
        for name, value in model.named_parameters()
        if not only_gates or name.startswith('gates.')
    }


def assert_gates_have_gradients(model):
    found = grads(model)
    assert found
    for name, grad in found.items():
        assert grad is not None and torch.isfinite(grad).all(), name
    for gate in find_gates(model).values():
        last = gate.fc if hasattr(gate, 'fc') else gate.fc2
        assert last.bias.grad.abs().sum() > 0
