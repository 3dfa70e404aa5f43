# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Wide residual networks with pre-activation blocks, as plain networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch.nn as nn
import torch.utils.checkpoint as cp
from mmcv.cnn import build_conv_layer, build_norm_layer
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor

from ..errors import UsageError
from .resnet_cifar import CifarBackbone, InitCfg


class WideBlock(BaseModule):
    """Norm, ReLU, convolution, twice, and a shortcut.

    Where the shape changes, the shortcut is a 1x1 convolution of the activated
    input.

    Args:
        in_channels (int): Channels of the block input.
        channels (int): Channels of both convolutions.
        stride (int): Stride of the first. Defaults to 1.
        dropout (float): Dropout before ``conv2``. Defaults to 0.
        conv_cfg (dict, optional): Config of the convolutions. Defaults to None.
        norm_cfg (dict): Config of the norms. Defaults to ``dict(type='BN')``.
        with_cp (bool): Checkpoint the block. Defaults to False.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int = 1,
        dropout: float = 0.0,
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN'),
        with_cp: bool = False,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, in_channels, postfix=1)
        self.norm2_name, norm2 = build_norm_layer(norm_cfg, channels, postfix=2)
        self.add_module(self.norm1_name, norm1)
        self.conv1 = build_conv_layer(
            conv_cfg, in_channels, channels, 3, stride=stride, padding=1, bias=False
        )
        self.add_module(self.norm2_name, norm2)
        self.conv2 = build_conv_layer(conv_cfg, channels, channels, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)
        self.shortcut: Optional[nn.Module] = None
        if stride != 1 or in_channels != channels:
            self.shortcut = build_conv_layer(
                conv_cfg, in_channels, channels, 1, stride=stride, bias=False
            )

    def body(self, x: Tensor) -> Tensor:
        """The block."""
        active = self.relu(getattr(self, self.norm1_name)(x))
        out = self.relu(getattr(self, self.norm2_name)(self.conv1(active)))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        return self.conv2(self.dropout(out)) + shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Run the block, checkpointed if asked for."""
        if self.with_cp and x.requires_grad:
            return cp.checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


@MODELS.register_module()
class WideResNet(CifarBackbone):
    """`Wide ResNet <https://arxiv.org/abs/1605.07146>`_.

    The last stage's output is normalized and activated by ``bn1``; the outputs
    of earlier stages are returned as they are. ``GatedWideResNet`` is the same with gates.

    Args:
        depth (int): 6 n + 4, with n blocks in each stage. Defaults to 28.
        widen_factor (float): Width in multiples of 16, 32, 64 channels.
            Defaults to 10.
        dropout (float): Dropout before the second convolution of each block.
            Defaults to 0.
        in_channels (int): Channels of the picture. Defaults to 3.
        out_indices (Sequence[int]): Stages whose output is returned.
            Defaults to ``(2, )``.
        conv_cfg (dict, optional): Config of the convolutions. Defaults to None.
        norm_cfg (dict): Config of the norms. Defaults to ``dict(type='BN')``.
        frozen_stages (int): Stem (0) and stages up to this number are frozen,
            -1 freezes nothing. Defaults to -1.
        norm_eval (bool): Keep batch norm in evaluation mode while training.
            Defaults to False.
        with_cp (bool): Checkpoint the blocks. Defaults to False.
        init_cfg (dict | list[dict], optional): Initialization config. Defaults to None.

    Example:
        >>> WideResNet(16, widen_factor=2)(torch.rand(2, 3, 32, 32))[0].shape
        torch.Size([2, 128, 8, 8])
    """

    def __init__(
        self,
        depth: int = 28,
        widen_factor: float = 10,
        dropout: float = 0.0,
        in_channels: int = 3,
        out_indices: Sequence[int] = (2,),
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN'),
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        init_cfg: InitCfg = None,
    ) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise UsageError(
                f'WideResNet: depth={depth} must be 6 n + 4, such as 10, 16, 22, 28 or 40'
            )
        if int(16 * widen_factor) < 1:
            raise UsageError(f'WideResNet: widen_factor={widen_factor} must be at least 1/16')
        if not 0 <= dropout < 1:
            raise UsageError(f'WideResNet: dropout={dropout} must be within [0, 1)')
        # Needed before nn.Module is set up: plain values only.
        self.cfg: dict[str, Any] = dict(
            dropout=dropout, conv_cfg=conv_cfg, norm_cfg=norm_cfg, with_cp=with_cp
        )
        channels = (16, *(int(width * widen_factor) for width in (16, 32, 64)))
        super().__init__(
            (depth - 4) // 6,
            channels,
            in_channels,
            out_indices,
            conv_cfg,
            frozen_stages,
            norm_eval,
            init_cfg,
        )
        self.depth = depth
        self.widen_factor = widen_factor
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, self.feat_dim, postfix=1)
        self.add_module(self.norm1_name, norm1)
        self.relu = nn.ReLU(inplace=True)
        self.freeze()

    def make_block(self, in_channels: int, channels: int, stride: int) -> nn.Module:
        return WideBlock(in_channels, channels, stride, **self.cfg)

    def finish(self, x: Tensor) -> Tensor:
        return self.relu(getattr(self, self.norm1_name)(x))

    def frozen_modules(self) -> Iterator[nn.Module]:
        yield from super().frozen_modules()
        if self.frozen_stages == len(self.stages):
            yield getattr(self, self.norm1_name)
