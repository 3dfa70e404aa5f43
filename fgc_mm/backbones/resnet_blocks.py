# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The blocks of the gated ResNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch.nn as nn
from mmcv.cnn import build_conv_layer, build_norm_layer
from mmcv.cnn.bricks import DropPath
from torch import Tensor

from .base import ApplyGate, GatedBlock, InitCfg


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
        gate (dict, optional): Config of the gate. Defaults to None, no gate.
        gated_convs (Sequence[str]): Convolutions to gate. Defaults to
            ``('conv1',)``.
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
        gate: Optional[dict] = None,
        gated_convs: Sequence[str] = gateable_convs,
        init_cfg: InitCfg = None,
    ) -> None:
        super().__init__(with_cp=with_cp, init_cfg=init_cfg)
        if expansion != 1:
            raise ValueError(f'expansion={expansion} must be 1 for a BasicBlock (depth 18, 34)')
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, planes, postfix=1)
        self.norm2_name, norm2 = build_norm_layer(norm_cfg, planes, postfix=2)
        self.conv1 = build_conv_layer(
            conv_cfg,
            inplanes,
            planes,
            3,
            stride=stride,
            padding=dilation,
            dilation=dilation,
            bias=False,
        )
        self.add_module(self.norm1_name, norm1)
        self.conv2 = build_conv_layer(conv_cfg, planes, planes, 3, padding=1, bias=False)
        self.add_module(self.norm2_name, norm2)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0 else nn.Identity()
        if 'conv1' in gated_convs:
            self.add_gate('gate1', gate, inplanes, planes, ['conv1'], ['conv2'], self.norm1_name)

    @property
    def norm1(self) -> nn.Module:
        """Normalisation after the first convolution."""
        return getattr(self, self.norm1_name)

    @property
    def norm2(self) -> nn.Module:
        """Normalisation after the second convolution."""
        return getattr(self, self.norm2_name)

    def body(self, x: Tensor, gated: ApplyGate) -> Tensor:
        """Everything between the gates' decision and the last ReLU."""
        out = gated('gate1', self.norm1(self.conv1(x)), self.relu)
        out = self.drop_path(self.norm2(self.conv2(out)))
        out += x if self.downsample is None else self.downsample(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        return self.relu(self.run_gated(self.body, x))


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
        gate (dict, optional): Config of the gates. Defaults to None, no gate.
        gated_convs (Sequence[str]): Convolutions to gate. Defaults to
            ``('conv1', 'conv2')``.
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
        gate: Optional[dict] = None,
        gated_convs: Sequence[str] = gateable_convs,
        init_cfg: InitCfg = None,
    ) -> None:
        super().__init__(with_cp=with_cp, init_cfg=init_cfg)
        outplanes = planes * expansion
        stride1, stride2 = (1, stride) if style == 'pytorch' else (stride, 1)
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, planes, postfix=1)
        self.norm2_name, norm2 = build_norm_layer(norm_cfg, planes, postfix=2)
        self.norm3_name, norm3 = build_norm_layer(norm_cfg, outplanes, postfix=3)
        self.conv1 = build_conv_layer(conv_cfg, inplanes, planes, 1, stride=stride1, bias=False)
        self.add_module(self.norm1_name, norm1)
        self.conv2 = build_conv_layer(
            conv_cfg,
            planes,
            planes,
            3,
            stride=stride2,
            padding=dilation,
            dilation=dilation,
            bias=False,
        )
        self.add_module(self.norm2_name, norm2)
        self.conv3 = build_conv_layer(conv_cfg, planes, outplanes, 1, bias=False)
        self.add_module(self.norm3_name, norm3)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0 else nn.Identity()
        if 'conv1' in gated_convs:
            self.add_gate('gate1', gate, inplanes, planes, ['conv1'], ['conv2'], self.norm1_name)
        if 'conv2' in gated_convs:
            self.add_gate('gate2', gate, inplanes, planes, ['conv2'], ['conv3'], self.norm2_name)

    @property
    def norm1(self) -> nn.Module:
        """Normalisation after the first convolution."""
        return getattr(self, self.norm1_name)

    @property
    def norm2(self) -> nn.Module:
        """Normalisation after the second convolution."""
        return getattr(self, self.norm2_name)

    @property
    def norm3(self) -> nn.Module:
        """Normalisation after the third convolution."""
        return getattr(self, self.norm3_name)

    def body(self, x: Tensor, gated: ApplyGate) -> Tensor:
        """Everything between the gates' decision and the last ReLU."""
        out = gated('gate1', self.norm1(self.conv1(x)), self.relu)
        out = gated('gate2', self.norm2(self.conv2(out)), self.relu)
        out = self.drop_path(self.norm3(self.conv3(out)))
        out += x if self.downsample is None else self.downsample(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        return self.relu(self.run_gated(self.body, x))
