# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Other strides for the MobileNetV2 of mmdet, mmseg and mmpretrain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch.nn as nn

from ..errors import UsageError


def set_strides(
    network: Any, stem_stride: Optional[int] = None, strides: Optional[Sequence[int]] = None
) -> None:
    """Let a MobileNetV2 divide small pictures less often; its weights stay as they are.

    Args:
        network (nn.Module): The network.
        stem_stride (int, optional): Stride of the first convolution. Defaults to None,
            what it is, 2.
        strides (Sequence[int], optional): Strides of the seven stages. Defaults to None,
            what they are, (1, 2, 2, 2, 1, 2, 1).

    Raises:
        UsageError: If there is another number of stages, or a stride is not 1 or 2.
    """
    if stem_stride is not None:
        if stem_stride not in (1, 2):
            raise UsageError(f'GatedMobileNetV2: stem_stride={stem_stride} must be 1 or 2')
        network.conv1.conv.stride = (stem_stride, stem_stride)
    if strides is None:
        return
    if len(strides) != 7 or any(stride not in (1, 2) for stride in strides):
        raise UsageError(f'GatedMobileNetV2: strides={strides} must be 7 values of 1 or 2')
    for number, stride in enumerate(strides, 1):
        block = getattr(network, f'layer{number}')[0]
        convs = [m for m in block.modules() if isinstance(m, nn.Conv2d)]
        depthwise = next(conv for conv in convs if conv.groups > 1)
        depthwise.stride = (stride, stride)
        block.stride = stride
        for shortcut in ('use_res_connect', 'with_res_shortcut'):
            if hasattr(block, shortcut):
                same = convs[0].in_channels == convs[-1].out_channels
                setattr(block, shortcut, stride == 1 and same)
