# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""MobileNetV2 with gated inverted residuals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Optional

import torch.nn as nn
from mmcv.cnn import ConvModule
from mmengine.model import Sequential
from mmengine.registry import MODELS
from torch import Tensor

from ..errors import UsageError
from .base import GatedBackbone
from .block import GatedBlock, PlainLayer, RunLayer


def make_divisible(value: float, divisor: int = 8) -> int:
    """The multiple of ``divisor`` nearest to ``value``, not below 90 % of it."""
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


class InvertedResidual(GatedBlock):
    """Expansion, depthwise convolution, projection.

    The mask is applied after the norm and activation of the depthwise
    convolution: a closed channel spares its part of all three.

    Args:
        in_channels (int): Channels of the block input.
        out_channels (int): Channels of the block output.
        stride (int): Stride of the depthwise convolution.
        expand_ratio (int): Its channels in multiples of ``in_channels``; 1
            leaves the expansion out.
        dilation (int): Dilation of the depthwise convolution. Defaults to 1.
        gate (dict, optional): Config of the gate, None for no gate.
            Defaults to None.
        width (int, optional): Channels of the depthwise convolution. Defaults
            to None, which goes by ``expand_ratio``.
        conv_cfg (dict, optional): Config of the convolutions. Defaults to None.
        norm_cfg (dict): Config of the norms. Defaults to ``dict(type='BN')``.
        act_cfg (dict): Config of the activations.
            Defaults to ``dict(type='ReLU6')``.
        with_cp (bool): Checkpoint the block. Defaults to False.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        expand_ratio: int,
        dilation: int = 1,
        gate: Optional[dict] = None,
        width: Optional[int] = None,
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN'),
        act_cfg: dict = dict(type='ReLU6'),
        with_cp: bool = False,
    ) -> None:
        super().__init__(with_cp=with_cp)
        self.use_res_connect = stride == 1 and in_channels == out_channels
        if expand_ratio == 1 and width not in (None, in_channels):
            raise UsageError(
                f'InvertedResidual: width={width} must be in_channels={in_channels} where nothing '
                'is expanded'
            )
        hidden = in_channels * expand_ratio if width is None else width
        cfg = dict(conv_cfg=conv_cfg, norm_cfg=norm_cfg)
        depthwise = ConvModule(
            hidden,
            hidden,
            3,
            stride=stride,
            padding=dilation,
            dilation=dilation,
            groups=hidden,
            act_cfg=act_cfg,
            **cfg,
        )
        layers = [depthwise, ConvModule(hidden, out_channels, 1, act_cfg=None, **cfg)]
        if expand_ratio != 1:
            layers.insert(0, ConvModule(in_channels, hidden, 1, act_cfg=act_cfg, **cfg))
        self.conv = nn.Sequential(*layers)
        names = [f'conv.{i}.conv' for i in range(len(layers))]
        self.add_gate(
            'gate1', gate, in_channels, hidden, names[:-1], names[-2:], self._norm_names()[:-1]
        )

    def _norm_names(self) -> list[str]:
        layers: list[Any] = list(self.conv)
        return [f'conv.{i}.{layer.norm_name}' for i, layer in enumerate(layers)]

    def body(self, x: Tensor, layer: RunLayer) -> Tensor:
        """The block under the masks of its gates."""
        layers: list[Any] = list(self.conv)
        norms = self._norm_names()
        depthwise = len(layers) - 2
        out = x
        for i, module in enumerate(layers[:-1]):
            gate = 'gate1' if i == depthwise else None
            out = layer(out, f'conv.{i}.conv', norms[i], module.activate, gate)
        out = layer(out, f'conv.{depthwise + 1}.conv', norms[-1])
        return x + out if self.use_res_connect else out

    def forward(self, x: Tensor) -> Tensor:
        return self.run_gated(self.body, x)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        # mmdet has its own names for the same three layers.
        names = ('expand_conv', 'depthwise_conv', 'linear_conv')[-len(self.conv) :]
        for index, name in enumerate(names):
            old = f'{prefix}{name}.'
            for key in [key for key in state_dict if key.startswith(old)]:
                state_dict[f'{prefix}conv.{index}.{key[len(old) :]}'] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


@MODELS.register_module()
class GatedMobileNetV2(GatedBackbone):
    """`MobileNetV2 <https://arxiv.org/abs/1801.04381>`_ whose channels are
    switched per picture.

    Names of the parameters are those of mmpretrain and mmseg; weights with
    mmdet's names load as well. For 32 x 32 pictures take ``stem_stride=1,
    strides=(1, 1, 2, 2, 1, 2, 1)``, which ends at 4 x 4.

    Args:
        widen_factor (float): Width multiplier. Defaults to 1.0.
        stem_stride (int): Stride of the first convolution, 1 or 2.
            Defaults to 2.
        strides (Sequence[int]): Strides of the seven stages, 1 or 2.
            Defaults to ``(1, 2, 2, 2, 1, 2, 1)``.
        dilations (Sequence[int]): Dilations of the first block of each stage,
            as in mmseg. Defaults to ``(1, 1, 1, 1, 1, 1, 1)``.
        out_indices (Sequence[int]): Stages whose output is returned, 7 stands
            for the last convolution. Defaults to ``(7, )``.
        last_conv (bool): Whether there is a last convolution, ``conv2``; mmseg
            has none. Defaults to True.
        frozen_stages (int): Stem (0) and stages up to this number are frozen,
            -1 freezes nothing. Defaults to -1.
        conv_cfg (dict, optional): Config of the convolutions. Defaults to None.
        norm_cfg (dict): Config of the norms. Defaults to ``dict(type='BN')``.
        act_cfg (dict): Config of the activations.
            Defaults to ``dict(type='ReLU6')``.
        kwargs: ``gate``, ``gated_blocks``, ``norm_eval``, ``with_cp``,
            ``init_cfg`` and others of :class:`GatedBackbone`.

    Example:
        >>> backbone = GatedMobileNetV2(out_indices=(2, 4, 6))
        >>> [tuple(out.shape) for out in backbone(torch.rand(1, 3, 64, 64))]
        [(1, 32, 8, 8), (1, 96, 4, 4), (1, 320, 2, 2)]
    """

    # Expansion ratio, channels and number of blocks of each stage.
    arch_settings: ClassVar[tuple[tuple[int, int, int], ...]] = (
        (1, 16, 1),
        (6, 24, 2),
        (6, 32, 3),
        (6, 64, 4),
        (6, 96, 3),
        (6, 160, 3),
        (6, 320, 1),
    )
    gateable_convs = ('depthwise',)

    def __init__(
        self,
        widen_factor: float = 1.0,
        stem_stride: int = 2,
        strides: Sequence[int] = (1, 2, 2, 2, 1, 2, 1),
        dilations: Sequence[int] = (1, 1, 1, 1, 1, 1, 1),
        out_indices: Sequence[int] = (7,),
        last_conv: bool = True,
        frozen_stages: int = -1,
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN'),
        act_cfg: dict = dict(type='ReLU6'),
        **kwargs: Any,
    ) -> None:
        super().__init__(frozen_stages=frozen_stages, **kwargs)
        self.layers = [f'layer{i + 1}' for i in range(len(self.arch_settings))]
        self.widen_factor = widen_factor
        self.stem_stride = stem_stride
        self.strides = tuple(strides)
        self.dilations = tuple(dilations)
        self.out_indices = tuple(out_indices)
        self.last_conv = last_conv
        self._check_arguments()
        self.set_blocks(
            [
                f'layer{i + 1}.{j}'
                for i, arch in enumerate(self.arch_settings)
                for j in range(arch[2])
            ]
        )
        cfg: dict[str, Any] = dict(conv_cfg=conv_cfg, norm_cfg=norm_cfg, act_cfg=act_cfg)
        width = make_divisible(32 * widen_factor)
        self.conv1 = ConvModule(3, width, 3, stride=stem_stride, padding=1, **cfg)
        for i, (expand_ratio, channels, num_blocks) in enumerate(self.arch_settings):
            out_channels = make_divisible(channels * widen_factor)
            blocks = []
            for j in range(num_blocks):
                block = InvertedResidual(
                    width,
                    out_channels,
                    stride=self.strides[i] if j == 0 else 1,
                    expand_ratio=expand_ratio,
                    dilation=self.dilations[i] if j == 0 else 1,
                    gate=self.gate_of(f'layer{i + 1}.{j}'),
                    width=self.width_of(f'layer{i + 1}.{j}'),
                    with_cp=self.with_cp,
                    **cfg,
                )
                blocks.append(block)
                width = out_channels
            self.add_module(f'layer{i + 1}', Sequential(*blocks))
        if last_conv:
            self.out_channel = int(1280 * max(widen_factor, 1.0))
            self.conv2 = ConvModule(width, self.out_channel, 1, **cfg)
            self.layers.append('conv2')
        else:
            self.out_channel = width
        self._freeze_stages()

    def _check_arguments(self) -> None:
        name, count = type(self).__name__, len(self.arch_settings)
        if self.stem_stride not in (1, 2):
            raise UsageError(f'{name}: stem_stride={self.stem_stride} must be 1 or 2')
        if len(self.strides) != count or any(stride not in (1, 2) for stride in self.strides):
            raise UsageError(f'{name}: strides={self.strides} must be {count} values of 1 or 2')
        if len(self.dilations) != count or any(dilation < 1 for dilation in self.dilations):
            raise UsageError(f'{name}: dilations={self.dilations} must be {count} values from 1')
        last = count if self.last_conv else count - 1
        if not self.out_indices or any(i not in range(last + 1) for i in self.out_indices):
            raise UsageError(f'{name}: out_indices={self.out_indices} must be from 0 to {last}')
        if self.frozen_stages not in range(-1, count + 1):
            raise UsageError(
                f'{name}: frozen_stages={self.frozen_stages} must be from -1 (none) to {count}'
            )

    def plain_layers(self) -> list[PlainLayer]:
        names = ['conv1', 'conv2'] if self.last_conv else ['conv1']
        return [
            PlainLayer(f'{name}.conv', f'{name}.{getattr(self, name).norm_name}') for name in names
        ]

    def frozen_modules(self) -> Iterator[nn.Module]:
        """Stem, then the stages up to ``frozen_stages``."""
        if self.frozen_stages >= 0:
            yield self.conv1
        for i in range(self.frozen_stages):
            yield getattr(self, f'layer{i + 1}')

    def _freeze_stages(self) -> None:
        super()._freeze_stages()
        # As upstream: the stem's weights are fixed, its norm still follows the
        # data unless norm_eval says otherwise.
        self.conv1.train(self.training)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Feature maps of the stages in ``out_indices``."""
        x = self.conv1(x)
        outs = []
        for i, layer in enumerate(self.layers[: max(self.out_indices) + 1]):
            x = getattr(self, layer)(x)
            if i in self.out_indices:
                outs.append(x)
        return tuple(outs)
