# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Wide residual networks with pre-activation blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch.nn as nn
from mmcv.cnn import build_conv_layer, build_norm_layer
from mmengine.registry import MODELS
from torch import Tensor

from ..errors import UsageError
from .block import GatedBlock, RunLayer
from .resnet_cifar import CifarBackbone


class WideBlock(GatedBlock):
    """Norm, ReLU, convolution, twice, and a shortcut.

    The mask is applied after the second norm and ReLU, where ``conv2`` reads.
    Where the shape changes, the shortcut is a 1x1 convolution of the activated
    input.

    Args:
        in_channels (int): Channels of the block input.
        channels (int): Channels of both convolutions.
        stride (int): Stride of the first. Defaults to 1.
        dropout (float): Dropout before ``conv2``. Defaults to 0.
        gate (dict, optional): Config of the gate after ``conv1``, None for no
            gate. Defaults to None.
        width (int, optional): Channels between the convolutions. Defaults to
            None, the same as ``channels``.
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
        gate: Optional[dict] = None,
        width: Optional[int] = None,
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN'),
        with_cp: bool = False,
    ) -> None:
        super().__init__(with_cp=with_cp)
        width = channels if width is None else width
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, in_channels, postfix=1)
        self.norm2_name, norm2 = build_norm_layer(norm_cfg, width, postfix=2)
        self.add_module(self.norm1_name, norm1)
        self.conv1 = build_conv_layer(
            conv_cfg, in_channels, width, 3, stride=stride, padding=1, bias=False
        )
        self.add_module(self.norm2_name, norm2)
        self.conv2 = build_conv_layer(conv_cfg, width, channels, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)
        self.shortcut: Optional[nn.Module] = None
        if stride != 1 or in_channels != channels:
            self.shortcut = build_conv_layer(
                conv_cfg, in_channels, channels, 1, stride=stride, bias=False
            )
        self.add_gate('gate1', gate, in_channels, width, ['conv1'], ['conv2'], [self.norm2_name])

    def body(self, x: Tensor, layer: RunLayer) -> Tensor:
        """The block under the masks of its gates."""
        active = self.relu(getattr(self, self.norm1_name)(x))
        out = self.dropout(layer(active, 'conv1', self.norm2_name, self.relu, 'gate1'))
        return layer(out, 'conv2') + (x if self.shortcut is None else self.shortcut(active))

    def forward(self, x: Tensor) -> Tensor:
        return self.run_gated(self.body, x)


@MODELS.register_module()
class GatedWideResNet(CifarBackbone):
    """`Wide ResNet <https://arxiv.org/abs/1605.07146>`_ whose channels are
    switched per picture.

    The last stage's output is normalized and activated by ``bn1``; the outputs
    of earlier stages are returned as they are.

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
        kwargs: ``gate``, ``gated_blocks``, ``frozen_stages``, ``norm_eval``,
            ``with_cp``, ``init_cfg`` and others of :class:`GatedBackbone`.

    Example:
        >>> backbone = GatedWideResNet(16, widen_factor=2)
        >>> backbone(torch.rand(2, 3, 32, 32))[0].shape
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
        **kwargs: Any,
    ) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise UsageError(
                f'GatedWideResNet: depth={depth} must be 6 n + 4, such as 10, 16, 22, 28 or 40'
            )
        if int(16 * widen_factor) < 1:
            raise UsageError(f'GatedWideResNet: widen_factor={widen_factor} must be at least 1/16')
        if not 0 <= dropout < 1:
            raise UsageError(f'GatedWideResNet: dropout={dropout} must be within [0, 1)')
        # Needed by make_block, before nn.Module is set up: plain numbers only.
        self.depth = depth
        self.widen_factor = widen_factor
        self.dropout = dropout
        channels = (16, *(int(width * widen_factor) for width in (16, 32, 64)))
        super().__init__(
            (depth - 4) // 6, channels, in_channels, out_indices, conv_cfg, norm_cfg, **kwargs
        )
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, self.feat_dim, postfix=1)
        self.add_module(self.norm1_name, norm1)
        self.relu = nn.ReLU(inplace=True)
        self._freeze_stages()

    def make_block(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        gate: Optional[dict],
        width: Optional[int],
    ) -> GatedBlock:
        return WideBlock(
            in_channels,
            channels,
            stride,
            dropout=self.dropout,
            gate=gate,
            width=width,
            conv_cfg=self.conv_cfg,
            norm_cfg=self.norm_cfg,
            with_cp=self.with_cp,
        )

    def finish(self, x: Tensor) -> Tensor:
        return self.relu(getattr(self, self.norm1_name)(x))

    def frozen_modules(self) -> Iterator[nn.Module]:
        yield from super().frozen_modules()
        if self.frozen_stages == len(self.stages):
            yield getattr(self, self.norm1_name)
