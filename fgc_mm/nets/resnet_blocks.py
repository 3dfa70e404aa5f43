# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The blocks of the gated ResNet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch.nn as nn
from mmcv.cnn import build_conv_layer, build_norm_layer
from mmcv.cnn.bricks import DropPath
from torch import Tensor

from ..errors import UsageError
from .block import GatedBlock, InitCfg, PlainLayer, RunLayer


def shortcut_layers(downsample: Optional[nn.Module]) -> list[PlainLayer]:
    """The convolution of a shortcut and its norm, by name."""
    if downsample is None:
        return []
    *_, conv, norm = dict(downsample.named_children())
    return [PlainLayer(f'downsample.{conv}', f'downsample.{norm}')]


def _join(block: Any, layer: RunLayer, out: Tensor, conv: str, norm: str, x: Tensor) -> Tensor:
    """The last convolution of a block plus its shortcut, and the last ReLU."""
    shortcut = x if block.downsample is None else block.downsample(x)
    if isinstance(block.drop_path, nn.Identity):
        return layer(out, conv, norm, block.relu, plus=shortcut)
    out = block.drop_path(layer(out, conv, norm))
    out += shortcut
    return block.relu(out)


class BasicBlock(GatedBlock):
    """Two 3x3 convolutions, the first of which can be gated.

    Args:
        inplanes (int): Channels of the input.
        planes (int): Channels of the convolutions.
        stride (int): Stride of the first convolution. Defaults to 1.
        dilation (int): Dilation of the first convolution. Defaults to 1.
        downsample (nn.Module, optional): The shortcut. Defaults to None, the
            identity.
        style (str): Not used; for a common signature. Defaults to 'pytorch'.
        expansion (int): Must be 1. Defaults to 1.
        with_cp (bool): Checkpoint the block. Defaults to False.
        conv_cfg (dict, optional): Config of convolutions. Defaults to None.
        norm_cfg (dict): Config of norms. Defaults to ``dict(type='BN')``.
        drop_path_rate (float): Stochastic depth. Defaults to 0.
        gates (dict, optional): Config of the gate of each convolution that
            can have one, ``conv1``; None means no gate. Defaults to None.
        widths (dict, optional): Channels of those convolutions; None means
            ``planes``. Defaults to None.
        init_cfg (dict, optional): Initialization config. Defaults to None.
    """

    default_expansion = 1
    gateable_convs = ('conv1',)
    last_norm = 'norm2'

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        dilation: int = 1,
        downsample: Optional[nn.Module] = None,
        style: str = 'pytorch',
        expansion: int = 1,
        with_cp: bool = False,
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN'),
        drop_path_rate: float = 0.0,
        gates: Optional[Mapping[str, Optional[dict]]] = None,
        widths: Optional[Mapping[str, Optional[int]]] = None,
        init_cfg: InitCfg = None,
    ) -> None:
        super().__init__(with_cp=with_cp, init_cfg=init_cfg)
        if expansion != 1:
            raise UsageError(f'expansion={expansion} must be 1 for a BasicBlock (depth 18, 34)')
        width = (widths or {}).get('conv1') or planes
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, width, postfix=1)
        self.norm2_name, norm2 = build_norm_layer(norm_cfg, planes, postfix=2)
        self.conv1 = build_conv_layer(
            conv_cfg,
            inplanes,
            width,
            3,
            stride=stride,
            padding=dilation,
            dilation=dilation,
            bias=False,
        )
        self.add_module(self.norm1_name, norm1)
        self.conv2 = build_conv_layer(conv_cfg, width, planes, 3, padding=1, bias=False)
        self.add_module(self.norm2_name, norm2)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0 else nn.Identity()
        gate = (gates or {}).get('conv1')
        self.add_gate('gate1', gate, inplanes, width, ['conv1'], ['conv2'], [self.norm1_name])

    @property
    def norm1(self) -> nn.Module:
        """Normalization after the first convolution."""
        return getattr(self, self.norm1_name)

    @property
    def norm2(self) -> nn.Module:
        """Normalization after the second convolution."""
        return getattr(self, self.norm2_name)

    def body(self, x: Tensor, layer: RunLayer) -> Tensor:
        """Everything after the gates' decision."""
        out = layer(x, 'conv1', self.norm1_name, self.relu, 'gate1')
        return _join(self, layer, out, 'conv2', self.norm2_name, x)

    def plain_layers(self) -> list[PlainLayer]:
        return shortcut_layers(self.downsample)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        return self.run_gated(self.body, x)


class Bottleneck(GatedBlock):
    """1x1, 3x3, 1x1 convolutions, the first two of which can be gated.

    Args:
        inplanes (int): Channels of the input.
        planes (int): Channels of the first two convolutions.
        stride (int): Stride of the block. Defaults to 1.
        dilation (int): Dilation of the 3x3 convolution. Defaults to 1.
        downsample (nn.Module, optional): The shortcut. Defaults to None, the
            identity.
        style (str): 'pytorch' puts the stride into the 3x3 convolution,
            'caffe' into the first 1x1. Defaults to 'pytorch'.
        expansion (int): Output channels / ``planes``. Defaults to 4.
        with_cp (bool): Checkpoint the block. Defaults to False.
        conv_cfg (dict, optional): Config of convolutions. Defaults to None.
        norm_cfg (dict): Config of norms. Defaults to ``dict(type='BN')``.
        drop_path_rate (float): Stochastic depth. Defaults to 0.
        gates (dict, optional): Config of the gate of each convolution that
            can have one, ``conv1``, ``conv2``; None means no gate. Defaults to None.
        widths (dict, optional): Channels of those convolutions; None means
            ``planes``. Defaults to None.
        init_cfg (dict, optional): Initialization config. Defaults to None.
    """

    default_expansion = 4
    gateable_convs = ('conv1', 'conv2')
    last_norm = 'norm3'

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        dilation: int = 1,
        downsample: Optional[nn.Module] = None,
        style: str = 'pytorch',
        expansion: int = 4,
        with_cp: bool = False,
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN'),
        drop_path_rate: float = 0.0,
        gates: Optional[Mapping[str, Optional[dict]]] = None,
        widths: Optional[Mapping[str, Optional[int]]] = None,
        init_cfg: InitCfg = None,
    ) -> None:
        super().__init__(with_cp=with_cp, init_cfg=init_cfg)
        outplanes = planes * expansion
        stride1, stride2 = (1, stride) if style == 'pytorch' else (stride, 1)
        width1, width2 = ((widths or {}).get(conv) or planes for conv in self.gateable_convs)
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, width1, postfix=1)
        self.norm2_name, norm2 = build_norm_layer(norm_cfg, width2, postfix=2)
        self.norm3_name, norm3 = build_norm_layer(norm_cfg, outplanes, postfix=3)
        self.conv1 = build_conv_layer(conv_cfg, inplanes, width1, 1, stride=stride1, bias=False)
        self.add_module(self.norm1_name, norm1)
        self.conv2 = build_conv_layer(
            conv_cfg,
            width1,
            width2,
            3,
            stride=stride2,
            padding=dilation,
            dilation=dilation,
            bias=False,
        )
        self.add_module(self.norm2_name, norm2)
        self.conv3 = build_conv_layer(conv_cfg, width2, outplanes, 1, bias=False)
        self.add_module(self.norm3_name, norm3)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0 else nn.Identity()
        gate1, gate2 = ((gates or {}).get(conv) for conv in self.gateable_convs)
        self.add_gate('gate1', gate1, inplanes, width1, ['conv1'], ['conv2'], [self.norm1_name])
        self.add_gate('gate2', gate2, inplanes, width2, ['conv2'], ['conv3'], [self.norm2_name])

    @property
    def norm1(self) -> nn.Module:
        """Normalization after the first convolution."""
        return getattr(self, self.norm1_name)

    @property
    def norm2(self) -> nn.Module:
        """Normalization after the second convolution."""
        return getattr(self, self.norm2_name)

    @property
    def norm3(self) -> nn.Module:
        """Normalization after the third convolution."""
        return getattr(self, self.norm3_name)

    def body(self, x: Tensor, layer: RunLayer) -> Tensor:
        """Everything after the gates' decision."""
        out = layer(x, 'conv1', self.norm1_name, self.relu, 'gate1')
        out = layer(out, 'conv2', self.norm2_name, self.relu, 'gate2')
        return _join(self, layer, out, 'conv3', self.norm3_name, x)

    def plain_layers(self) -> list[PlainLayer]:
        return shortcut_layers(self.downsample)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        return self.run_gated(self.body, x)
