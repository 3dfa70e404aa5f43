# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .cifar import ResNetCifar, WideResNet
from .gated import Gated
from .names import (
    GatedMobileNetV2,
    GatedResNet,
    GatedResNetCifar,
    GatedResNetV1c,
    GatedResNetV1d,
    GatedWideResNet,
)

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
