# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Convolutions and linear layers: which can be switched, and where their channels are."""

from __future__ import annotations

from typing import Optional

import torch.nn as nn
from torch.nn.utils.parametrize import is_parametrized

# Their forward is that of torch's own, around which they pad or look for empty inputs.
_WRAPPERS = (
    'mmcv.cnn.bricks.wrappers',
    'mmcv.cnn.bricks.conv2d_adaptive_padding',
    'timm.layers.conv2d_same',
    'timm.layers.linear',
)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a convolution or linear layer, of whatever kind: one node of a record."""
    return isinstance(module, (*_CONVS, nn.Linear))


def layer_fault(module: nn.Module) -> Optional[str]:
    """Why the channels of a layer cannot be switched, None if they can."""
    kind = type(module)
    if is_parametrized(module) or (
        getattr(module, '_forward_pre_hooks', None)
        and any(
            type(hook).__module__.startswith('torch.nn.utils')
            for hook in module._forward_pre_hooks.values()
        )
    ):
        return 'its weight is computed anew in every pass'
    own = kind.forward
    if own in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward, nn.Linear.forward):
        return None
    if own.__module__.startswith(_WRAPPERS):
        return None
    return f'{kind.__name__} uses its weight in a way of its own'


def channel_axis(layer: nn.Module) -> int:
    """Where the channels of a layer's input and output are, from the end."""
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)  # type: ignore[arg-type]
