# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .gated import Gated
from .names import (
    GatedMobileNetV2,
    GatedResNet,
    GatedResNetCifar,
    GatedResNetV1c,
    GatedResNetV1d,
    GatedWideResNet,
)
from .resnet_cifar import ResNetCifar
from .wide_resnet import WideResNet

__all__ = [
    'Gated',
    'GatedMobileNetV2',
    'GatedResNet',
    'GatedResNetCifar',
    'GatedResNetV1c',
    'GatedResNetV1d',
    'GatedWideResNet',
    'ResNetCifar',
    'WideResNet',
]
