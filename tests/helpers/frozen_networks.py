# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Small networks of many families, gated on their sites, with gates that depend on the picture."""

import mmpretrain.models  # noqa: F401
import torch
import torch.nn as nn
from mmengine.registry import MODELS

import fgc_mm  # noqa: F401
from fgc_mm.gates import find_gates

_STAGE = dict(num_modules=1, block='BASIC')
FAMILIES = {
    'resnet18': dict(type='mmdet.ResNet', depth=18, base_channels=8),
    'resnet50': dict(type='mmdet.ResNet', depth=50, base_channels=8, num_stages=2, strides=(1, 2),
                     dilations=(1, 1), out_indices=(0, 1)),
    'mobilenet': dict(type='mmpretrain.MobileNetV2', widen_factor=0.35),
    'cspnext': dict(type='mmdet.CSPNeXt', deepen_factor=0.167, widen_factor=0.125),
    'vgg': dict(type='mmpretrain.VGG', depth=11, norm_cfg=dict(type='BN')),
    'se_resnet': dict(type='mmpretrain.SEResNet', depth=50, num_stages=1, strides=(1,),
                      dilations=(1,), out_indices=(0,), stem_channels=16, base_channels=16),
    'convnext': dict(type='mmpretrain.ConvNeXt', arch=dict(depths=[1, 1, 1, 1],
                                                           channels=[8, 16, 16, 32])),
    'densenet': dict(type='mmpretrain.DenseNet', arch=dict(growth_rate=8, depths=[2, 2, 2, 2],
                                                           init_channels=16)),
    'swin': dict(type='mmpretrain.SwinTransformer', pad_small_map=True,
                 arch=dict(embed_dims=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4])),
    'hrnet': dict(type='mmdet.HRNet', extra=dict(
        stage1=dict(num_modules=1, num_branches=1, block='BOTTLENECK', num_blocks=(1,),
                    num_channels=(8,)),
        stage2=dict(_STAGE, num_branches=2, num_blocks=(1, 1), num_channels=(8, 16)),
        stage3=dict(_STAGE, num_branches=3, num_blocks=(1, 1, 1), num_channels=(8, 16, 32)),
        stage4=dict(_STAGE, num_branches=4, num_blocks=(1,) * 4, num_channels=(8, 16, 32, 64)))),
}  # fmt: skip


def build(family='resnet18', **options):
    """A gated network in evaluation mode whose norms and gates do something."""
    torch.manual_seed(0)
    net = MODELS.build(dict(type='Gated', backbone=FAMILIES[family], **options))
    wake(net)
    return net


def wake(net):
    """Norms and gates get values as if they had been trained."""
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.5)
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    for gate in find_gates(net).values():
        if hasattr(gate, 'fc2'):
            nn.init.normal_(gate.fc2.weight)
            nn.init.zeros_(gate.fc2.bias)


def pictures(batch=2, size=(64, 64)):
    """Pictures of different contrast and color: their gates differ."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.linspace(0.3, 3, batch)[:, None, None, None]
    color = 2 * torch.randn(batch, 3, 1, 1, generator=generator)
    return torch.randn(batch, 3, *size, generator=generator) * scale + color


def listed(outs):
    return [outs] if isinstance(outs, torch.Tensor) else list(outs)


def assert_equal_outputs(outs, wanted, tolerance=1e-4):
    """Equal up to a difference relative to the largest value."""
    outs, wanted = listed(outs), listed(wanted)
    assert len(outs) == len(wanted)
    for out, want in zip(outs, wanted, strict=True):
        assert out.shape == want.shape
        assert out.dtype == want.dtype
        difference = (out.float() - want.float()).abs().max()
        assert difference <= tolerance * want.float().abs().max()
