# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .base import GatedBackbone
from .block import GatedBlock, build_gate
from .gated import Gated
from .mobilenet_v2 import GatedMobileNetV2
from .resnet import GatedResNet, GatedResNetV1c, GatedResNetV1d
from .resnet_cifar import GatedResNetCifar
from .wide_resnet import GatedWideResNet

__all__ = [
    'Gated',
    'GatedBackbone',
    'GatedBlock',
    'GatedMobileNetV2',
    'GatedResNet',
    'GatedResNetCifar',
    'GatedResNetV1c',
    'GatedResNetV1d',
    'GatedWideResNet',
    'build_gate',
]
