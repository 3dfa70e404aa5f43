# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Stock backbones of mmdet, mmseg and mmpretrain, as their configs build them."""

import importlib

from mmengine.registry import MODELS

HRNET = dict(
    stage1=dict(
        num_modules=1, num_branches=1, block='BOTTLENECK', num_blocks=(4,), num_channels=(64,)
    ),
    stage2=dict(
        num_modules=1, num_branches=2, block='BASIC', num_blocks=(4, 4), num_channels=(32, 64)
    ),
    stage3=dict(
        num_modules=4,
        num_branches=3,
        block='BASIC',
        num_blocks=(4, 4, 4),
        num_channels=(32, 64, 128),
    ),
    stage4=dict(
        num_modules=3,
        num_branches=4,
        block='BASIC',
        num_blocks=(4, 4, 4, 4),
        num_channels=(32, 64, 128, 256),
    ),
)
V1C = dict(type='mmseg.ResNetV1c', depth=50, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4))
STDC = dict(
    type='mmseg.STDCNet',
    stdc_type='STDCNet1',
    in_channels=3,
    channels=(32, 64, 256, 512, 1024),
    bottleneck_type='cat',
    num_convs=4,
    norm_cfg=dict(type='BN'),
    act_cfg=dict(type='ReLU'),
    with_final_conv=True,
)
RTMDET = dict(
    type='mmdet.CSPNeXt', deepen_factor=0.167, widen_factor=0.375, act_cfg=dict(type='SiLU')
)
PVT = dict(type='mmdet.PyramidVisionTransformerV2', embed_dims=32, num_layers=[2, 2, 2, 2])

# Name -> config, number of sites, per cent of the MACs in layers that are switched on one side at
# least (224 x 224).
BACKBONES = {
    'resnet18': (dict(type='mmdet.ResNet', depth=18), 8, 92),
    'resnet50': (dict(type='mmdet.ResNet', depth=50), 33, 92),
    'resnet50-v1c': (V1C, 35, 88),
    'resnext50': (dict(type='mmdet.ResNeXt', depth=50, groups=32, base_width=4), 17, 92),
    'regnetx': (
        dict(type='mmdet.RegNet', arch='regnetx_3.2gf', out_indices=(0, 1, 2, 3)), 26, 98,
    ),
    'res2net50': (dict(type='mmdet.Res2Net', depth=50, scales=4, base_width=26), 31, 60),
    'cspnext-tiny': (RTMDET, 20, 99),
    'cspdarknet-s': (dict(type='mmdet.CSPDarknet', deepen_factor=0.33, widen_factor=0.5), 22, 99),
    'hrnet-w32': (dict(type='mmdet.HRNet', extra=HRNET), 130, 91),
    'swin-t': (dict(type='mmdet.SwinTransformer'), 12, 63),
    'pvt-v2-b0': (PVT, 8, 80),
    'mobilenet-v2': (dict(type='mmdet.MobileNetV2'), 19, 99),
    'efficientnet-b0': (
        dict(type='mmdet.EfficientNet', arch='b0', out_indices=(3, 4, 5)), 33, 99,
    ),
    'mit-b0': (dict(type='mmseg.MixVisionTransformer'), 16, 82),
    'bisenet-v2': (dict(type='mmseg.BiSeNetV2'), 20, 91),
    'stdc1': (STDC, 18, 80),
    'vgg16-bn': (dict(type='mmpretrain.VGG', depth=16, norm_cfg=dict(type='BN')), 12, 99),
    'convnext-t': (dict(type='mmpretrain.ConvNeXt', arch='tiny'), 18, 93),
    'mobilenet-v3': (dict(type='mmpretrain.MobileNetV3', arch='small'), 21, 95),
    'se-resnet50': (dict(type='mmpretrain.SEResNet', depth=50), 49, 92),
    'densenet121': (dict(type='mmpretrain.DenseNet', arch='121'), 103, 99),
    'shufflenet-v2': (dict(type='mmpretrain.ShuffleNetV2'), 36, 99),
    'deit-s': (dict(type='mmpretrain.VisionTransformer', arch='deit-s'), 12, 65),
    'repvgg-a0': (dict(type='mmpretrain.RepVGG', arch='A0'), 0, 0),
    'resnet-cifar': (dict(type='mmpretrain.ResNet_CIFAR', depth=18), 8, 98),
}  # fmt: skip


def build(name, **changes):
    """A backbone of the table."""
    cfg = {**BACKBONES[name][0], **changes}
    importlib.import_module(f'{cfg["type"].partition(".")[0]}.models')
    return MODELS.build(cfg)
