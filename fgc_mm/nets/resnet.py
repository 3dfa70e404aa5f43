# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The gated ResNet, for classification, detection and segmentation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Optional, Union

import torch.nn as nn
from mmcv.cnn import build_conv_layer, build_norm_layer
from mmengine.model import Sequential
from mmengine.registry import MODELS
from torch import Tensor

from ..errors import UsageError
from .base import GatedBackbone
from .block import GatedBlock, PlainLayer
from .resnet_blocks import BasicBlock, Bottleneck

Block = Union[type[BasicBlock], type[Bottleneck]]


@MODELS.register_module()
class GatedResNet(GatedBackbone):
    """ResNet whose channels are switched per image.

    Takes the place of ``ResNet`` in mmdet, mmseg and mmpretrain configs and
    loads the weights of theirs and of torchvision's: all names but those of
    the gates agree. It differs from them in two defaults, ``norm_eval=False``
    (mmdet: True) and ``out_indices=(0, 1, 2, 3)`` (mmpretrain: the last stage;
    its necks and heads take the last of several). Deformable convolutions and
    plugins are not supported.

    Args:
        depth (int): 18, 34, 50, 101 or 152.
        in_channels (int): Channels of the picture. Defaults to 3.
        stem_channels (int, optional): Channels of the stem. Defaults to None,
            the same as ``base_channels``.
        base_channels (int): Width of the first stage. Defaults to 64.
        expansion (int, optional): Output channels of a bottleneck / its width.
            Defaults to None: 1 for depth 18 and 34, else 4.
        num_stages (int): Number of stages, 1 to 4. Defaults to 4.
        strides (Sequence[int]): Strides of the stages.
            Defaults to (1, 2, 2, 2).
        dilations (Sequence[int]): Dilations of the stages.
            Defaults to (1, 1, 1, 1).
        out_indices (Sequence[int]): Stages whose outputs are returned.
            Defaults to (0, 1, 2, 3).
        style (str): 'pytorch' puts a bottleneck's stride into its 3x3
            convolution, 'caffe' into its first. Defaults to 'pytorch'.
        deep_stem (bool): Three 3x3 convolutions in place of the 7x7 one.
            Defaults to False.
        avg_down (bool): Shortcuts pool before their convolution instead of
            striding. Defaults to False.
        conv_cfg (dict, optional): Config of convolutions. Defaults to None.
        norm_cfg (dict): Config of norms.
            Defaults to ``dict(type='BN', requires_grad=True)``.
        dcn (dict, optional): Must be None. Defaults to None.
        stage_with_dcn (Sequence[bool], optional): Not used. Defaults to None.
        plugins (list[dict], optional): Must be None. Defaults to None.
        multi_grid (Sequence[int], optional): Dilations of the last stage's
            blocks. Defaults to None.
        contract_dilation (bool): Halve the dilation of the first block of a
            stage. Defaults to False.
        zero_init_residual (bool): Start the last norm of every block at zero,
            when training from scratch. Defaults to True.
        drop_path_rate (float): Stochastic depth of the last block, growing
            linearly from 0. Defaults to 0.
        **kwargs: ``gate``, ``gated_blocks``, ``gated_convs``,
            ``frozen_stages``, ``norm_eval``, ``with_cp``,
            ``gates_follow_freeze``, ``pretrained`` and ``init_cfg`` of
            :class:`GatedBackbone`.

    Example:
        >>> backbone = GatedResNet(50, gated_blocks=['layer3', 'layer4'])
        >>> [tuple(out.shape) for out in backbone(torch.rand(2, 3, 64, 64))]
        [(2, 256, 16, 16), (2, 512, 8, 8), (2, 1024, 4, 4), (2, 2048, 2, 2)]
    """

    arch_settings: dict[int, tuple[Block, tuple[int, ...]]] = {
        18: (BasicBlock, (2, 2, 2, 2)),
        34: (BasicBlock, (3, 4, 6, 3)),
        50: (Bottleneck, (3, 4, 6, 3)),
        101: (Bottleneck, (3, 4, 23, 3)),
        152: (Bottleneck, (3, 8, 36, 3)),
    }

    def __init__(
        self,
        depth: int,
        in_channels: int = 3,
        stem_channels: Optional[int] = None,
        base_channels: int = 64,
        expansion: Optional[int] = None,
        num_stages: int = 4,
        strides: Sequence[int] = (1, 2, 2, 2),
        dilations: Sequence[int] = (1, 1, 1, 1),
        out_indices: Sequence[int] = (0, 1, 2, 3),
        style: str = 'pytorch',
        deep_stem: bool = False,
        avg_down: bool = False,
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN', requires_grad=True),
        dcn: Optional[dict] = None,
        stage_with_dcn: Optional[Sequence[bool]] = None,
        plugins: Optional[list[dict]] = None,
        multi_grid: Optional[Sequence[int]] = None,
        contract_dilation: bool = False,
        zero_init_residual: bool = True,
        drop_path_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if base_channels < 1:
            raise UsageError(
                f'{type(self).__name__}: base_channels={base_channels} must be at least 1'
            )
        self._check(depth, num_stages, strides, dilations, out_indices, style, dcn, plugins)
        block, stage_blocks = self.arch_settings[depth]
        self.depth = depth
        self.block: Block = block
        self.stage_blocks = stage_blocks[:num_stages]
        self.expansion = block.default_expansion if expansion is None else expansion
        self.stem_channels = base_channels if stem_channels is None else stem_channels
        self.base_channels = base_channels
        self.num_stages = num_stages
        self.strides = strides
        self.dilations = dilations
        self.out_indices = out_indices
        self.style = style
        self.deep_stem = deep_stem
        self.avg_down = avg_down
        self.conv_cfg = conv_cfg
        self.norm_cfg = norm_cfg
        self.contract_dilation = contract_dilation
        self.zero_init_residual = zero_init_residual
        self.set_blocks(
            [f'layer{i + 1}.{j}' for i, n in enumerate(self.stage_blocks) for j in range(n)],
            block.gateable_convs,
        )
        if multi_grid is not None and len(multi_grid) < self.stage_blocks[-1]:
            raise UsageError(
                f'{type(self).__name__}: multi_grid={tuple(multi_grid)} must have a dilation for '
                f'each of the {self.stage_blocks[-1]} blocks of the last stage'
            )

        self._make_stem(in_channels, self.stem_channels)
        self.res_layers = []
        inplanes = self.stem_channels
        last = max(sum(stage_blocks) - 1, 1)
        drop_rates = [drop_path_rate * k / last for k in range(sum(stage_blocks))]
        for i, num_blocks in enumerate(self.stage_blocks):
            name = f'layer{i + 1}'
            blocks_before = sum(self.stage_blocks[:i])
            stage = self._make_stage(
                name,
                inplanes,
                base_channels * 2**i,
                strides[i],
                self._block_dilations(i, multi_grid),
                drop_rates[blocks_before : blocks_before + num_blocks],
            )
            inplanes = base_channels * 2**i * self.expansion
            self.add_module(name, stage)
            self.res_layers.append(name)
        self.feat_dim = inplanes
        self._freeze_stages()

    def _check(
        self,
        depth: int,
        num_stages: int,
        strides: Sequence[int],
        dilations: Sequence[int],
        out_indices: Sequence[int],
        style: str,
        dcn: Optional[dict],
        plugins: Optional[list[dict]],
    ) -> None:
        name = type(self).__name__
        if depth not in self.arch_settings:
            raise UsageError(f'{name}: depth={depth!r} must be one of {list(self.arch_settings)}')
        if num_stages not in range(1, 5):
            raise UsageError(f'{name}: num_stages={num_stages} must be 1, 2, 3 or 4')
        for key, value in (('strides', strides), ('dilations', dilations)):
            if len(value) != num_stages:
                raise UsageError(
                    f'{name}: {key}={tuple(value)} must have num_stages={num_stages} values'
                )
        if not out_indices or any(i not in range(num_stages) for i in out_indices):
            raise UsageError(
                f'{name}: out_indices={tuple(out_indices)} must be some of '
                f'{tuple(range(num_stages))}'
            )
        if self.frozen_stages not in range(-1, num_stages + 1):
            raise UsageError(
                f'{name}: frozen_stages={self.frozen_stages} must be within -1 and {num_stages}'
            )
        if style not in ('pytorch', 'caffe'):
            raise UsageError(f"{name}: style={style!r} must be 'pytorch' or 'caffe'")
        for key, cfg in (('dcn', dcn), ('plugins', plugins)):
            if cfg is not None:
                raise UsageError(
                    f'{name}: {key}={cfg!r} is not supported in a gated block; leave it None'
                )

    @property
    def norm1(self) -> nn.Module:
        """Normalization of the (not deep) stem."""
        return getattr(self, self.norm1_name)

    def _make_stem(self, in_channels: int, channels: int) -> None:
        if self.deep_stem:
            layers: list[nn.Module] = []
            widths = (in_channels, channels // 2, channels // 2, channels)
            for i, (width_in, width_out) in enumerate(pairwise(widths)):
                layers += [
                    build_conv_layer(
                        self.conv_cfg,
                        width_in,
                        width_out,
                        3,
                        stride=2 if i == 0 else 1,
                        padding=1,
                        bias=False,
                    ),
                    build_norm_layer(self.norm_cfg, width_out)[1],
                    nn.ReLU(inplace=True),
                ]
            self.stem = nn.Sequential(*layers)
        else:
            self.conv1 = build_conv_layer(
                self.conv_cfg, in_channels, channels, 7, stride=2, padding=3, bias=False
            )
            self.norm1_name, norm1 = build_norm_layer(self.norm_cfg, channels, postfix=1)
            self.add_module(self.norm1_name, norm1)
            self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)

    def _block_dilations(self, stage: int, multi_grid: Optional[Sequence[int]]) -> list[int]:
        num_blocks, dilation = self.stage_blocks[stage], self.dilations[stage]
        if multi_grid is not None and stage == self.num_stages - 1:
            return list(multi_grid[:num_blocks])
        first = dilation // 2 if self.contract_dilation and dilation > 1 else dilation
        return [first] + [dilation] * (num_blocks - 1)

    def _make_shortcut(self, inplanes: int, outplanes: int, stride: int) -> Optional[nn.Module]:
        if stride == 1 and inplanes == outplanes:
            return None
        layers: list[nn.Module] = []
        if self.avg_down:
            pool = nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False)
            layers.append(pool if stride != 1 else nn.Identity())
        conv_stride = 1 if self.avg_down else stride
        layers += [
            build_conv_layer(self.conv_cfg, inplanes, outplanes, 1, stride=conv_stride, bias=False),
            build_norm_layer(self.norm_cfg, outplanes)[1],
        ]
        return nn.Sequential(*layers)

    def _make_stage(
        self,
        name: str,
        inplanes: int,
        planes: int,
        stride: int,
        dilations: Sequence[int],
        drop_rates: Sequence[float],
    ) -> Sequential:
        init_cfg = None
        if self.zero_init_residual and self.from_scratch:
            init_cfg = dict(type='Constant', val=0, override=dict(name=self.block.last_norm))
        blocks = []
        for j, (dilation, drop_rate) in enumerate(zip(dilations, drop_rates, strict=True)):
            blocks.append(
                self.block(
                    inplanes,
                    planes,
                    stride=stride,
                    dilation=dilation,
                    downsample=self._make_shortcut(inplanes, planes * self.expansion, stride),
                    style=self.style,
                    expansion=self.expansion,
                    with_cp=self.with_cp,
                    conv_cfg=self.conv_cfg,
                    norm_cfg=self.norm_cfg,
                    drop_path_rate=drop_rate,
                    gates={c: self.gate_of(f'{name}.{j}', c) for c in self.gateable_convs},
                    widths={c: self.width_of(f'{name}.{j}', c) for c in self.gateable_convs},
                    init_cfg=init_cfg,
                )
            )
            inplanes, stride = planes * self.expansion, 1
        return Sequential(*blocks)

    def plain_layers(self) -> list[PlainLayer]:
        if self.deep_stem:
            return [PlainLayer(f'stem.{i}', f'stem.{i + 1}', f'stem.{i + 2}') for i in (0, 3, 6)]
        return [PlainLayer('conv1', self.norm1_name, 'relu')]

    def private_inputs(self) -> list[GatedBlock]:
        if type(self).forward is not GatedResNet.forward:
            return []  # may return what is between blocks
        private: list[GatedBlock] = []
        for i, name in enumerate(self.res_layers):
            stage = getattr(self, name)
            if type(stage) is Sequential:
                private += list(stage)[1 if i - 1 in self.out_indices else 0 :]
        return private

    def frozen_modules(self) -> list[nn.Module]:
        """Stem and stages up to ``frozen_stages``."""
        if self.frozen_stages < 0:
            return []
        stem = [self.stem] if self.deep_stem else [self.conv1, self.norm1]
        return stem + [getattr(self, name) for name in self.res_layers[: self.frozen_stages]]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the stages in ``out_indices``.

        Args:
            x (Tensor): B x in_channels x H x W.

        Returns:
            tuple[Tensor]: Always a tuple, also for a single stage.
        """
        x = self.stem(x) if self.deep_stem else self.relu(self.norm1(self.conv1(x)))
        x = self.maxpool(x)
        outs = []
        for i, name in enumerate(self.res_layers):
            x = getattr(self, name)(x)
            if i in self.out_indices:
                outs.append(x)
        return tuple(outs)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """mmpretrain names deep stems and pooled shortcuts in another way."""
        _rename_mmpretrain(state_dict, prefix, self.avg_down)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _rename_mmpretrain(state_dict: dict, prefix: str, avg_down: bool) -> None:
    """Give mmpretrain's deep stem (``stem.0.conv``) and unstrided shortcut
    without a pooling layer the names mmdet and mmseg use."""
    keys = set(state_dict)
    renamed = {}
    for key in keys:
        name = key[len(prefix) :] if key.startswith(prefix) else ''
        stem = re.fullmatch(r'stem\.(\d)\.(\w+)\.(\w+)', name)
        shortcut = re.fullmatch(r'(layer\d\.0\.downsample)\.(\d)\.(\w+)', name)
        if stem:
            index = 3 * int(stem[1]) + (stem[2] != 'conv')
            renamed[f'{prefix}stem.{index}.{stem[3]}'] = state_dict.pop(key)
        elif shortcut and avg_down and f'{prefix}{shortcut[1]}.0.weight' in keys:
            index = int(shortcut[2]) + 1
            renamed[f'{prefix}{shortcut[1]}.{index}.{shortcut[3]}'] = state_dict.pop(key)
    state_dict.update(renamed)


@MODELS.register_module()
class GatedResNetV1c(GatedResNet):
    """:class:`GatedResNet` with a deep stem."""

    def __init__(self, depth: int, **kwargs: Any) -> None:
        super().__init__(depth, deep_stem=True, avg_down=False, **kwargs)


@MODELS.register_module()
class GatedResNetV1d(GatedResNet):
    """:class:`GatedResNet` with a deep stem and pooling shortcuts."""

    def __init__(self, depth: int, **kwargs: Any) -> None:
        super().__init__(depth, deep_stem=True, avg_down=True, **kwargs)
