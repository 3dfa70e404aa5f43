# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""ResNets for 32 x 32 pictures that no package of OpenMMLab has, as plain networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Optional, Union

import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from mmcv.cnn import build_conv_layer, build_norm_layer
from mmengine.model import BaseModule, Sequential
from mmengine.registry import MODELS
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError


class Layers(BaseModule):
    """Convolutions and norms by config: ``conv1``, ``bn1``, ..."""

    def __init__(
        self,
        conv_cfg: Optional[dict],
        norm_cfg: dict,
        init_cfg: Union[dict, Sequence[dict], None] = None,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        self.conv_cfg = conv_cfg
        self.norm_cfg = norm_cfg
        self.relu = nn.ReLU(inplace=True)

    def conv(self, inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Module:
        """A new convolution."""
        return build_conv_layer(
            self.conv_cfg, inputs, outputs, size, stride=stride, padding=size // 2, bias=False
        )

    def add_norm(self, number: int, channels: int) -> None:
        """Add a norm under its usual name."""
        name, norm = build_norm_layer(self.norm_cfg, channels, postfix=number)
        setattr(self, f'norm{number}_name', name)
        self.add_module(name, norm)

    @property
    def norm1(self) -> nn.Module:
        return getattr(self, self.norm1_name)

    @property
    def norm2(self) -> nn.Module:
        return getattr(self, self.norm2_name)


class CifarBlock(Layers):
    """Two convolutions around a shortcut without parameters: where the shape changes, it takes
    every ``stride``-th pixel and adds zero channels on both sides."""

    def __init__(
        self, inputs: int, channels: int, stride: int, with_cp: bool = False, **layers: Any
    ) -> None:
        super().__init__(**layers)
        self.with_cp = with_cp
        self.stride = stride
        self.extra_channels = channels - inputs
        self.add_layers(inputs, channels)

    def add_layers(self, inputs: int, channels: int) -> None:
        self.conv1 = self.conv(inputs, channels, stride=self.stride)
        self.add_norm(1, channels)
        self.conv2 = self.conv(channels, channels)
        self.add_norm(2, channels)

    def body(self, x: Tensor) -> Tensor:
        """The block."""
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.extra_channels:
            before = self.extra_channels // 2
            x = F.pad(x, (0, 0, 0, 0, before, self.extra_channels - before))
        return self.relu(out + x)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block, checkpointed if asked for."""
        if self.with_cp and x.requires_grad:
            return cp.checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


class WideBlock(CifarBlock):
    """Norm, ReLU, convolution, twice. Where the shape changes, the shortcut is a 1x1 convolution
    of the activated input."""

    def __init__(self, *shape: int, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(*shape, **options)  # type: ignore[arg-type]
        self.dropout = nn.Dropout(dropout)

    def add_layers(self, inputs: int, channels: int) -> None:
        self.add_norm(1, inputs)
        self.conv1 = self.conv(inputs, channels, stride=self.stride)
        self.add_norm(2, channels)
        self.conv2 = self.conv(channels, channels)
        if self.stride != 1 or self.extra_channels:
            self.shortcut = self.conv(inputs, channels, size=1, stride=self.stride)

    def body(self, x: Tensor) -> Tensor:
        active = self.relu(self.norm1(x))
        out = self.relu(self.norm2(self.conv1(active)))
        shortcut = self.shortcut(active) if hasattr(self, 'shortcut') else x
        return self.conv2(self.dropout(out)) + shortcut


class CifarBackbone(Layers):
    """Three stages of equally many blocks at strides 1, 2, 2; no pooling.

    Args:
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
        init_cfg (dict | list[dict], optional): Initialization config.
            Defaults to None, which is Kaiming's for the convolutions.
    """

    stages: ClassVar[tuple[str, ...]] = ('layer1', 'layer2', 'layer3')
    block: ClassVar[type[CifarBlock]] = CifarBlock
    norm_last: ClassVar[bool] = False
    """Whether the norm outside of the blocks is behind the last stage, not in the stem."""

    def __init__(
        self,
        in_channels: int = 3,
        out_indices: Sequence[int] = (2,),
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN'),
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        init_cfg: Union[dict, Sequence[dict], None] = None,
    ) -> None:
        usual: list[dict] = [
            dict(type='Kaiming', layer='Conv2d'),
            dict(type='Constant', val=1, layer=['_BatchNorm', 'GroupNorm']),
        ]
        super().__init__(conv_cfg, norm_cfg, init_cfg or usual)
        name, count = type(self).__name__, len(self.stages)
        if not out_indices or any(index not in range(count) for index in out_indices):
            raise UsageError(f'{name}: out_indices={out_indices} must be some of (0, 1, 2)')
        if frozen_stages not in range(-1, count + 1):
            raise UsageError(
                f'{name}: frozen_stages={frozen_stages} must be from -1 (none) to {count}'
            )
        self.in_channels = in_channels
        self.out_indices = tuple(out_indices)
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.with_cp = with_cp

    def add_layers(self, blocks: int, channels: Sequence[int], **options: Any) -> None:
        """Build the network.

        Args:
            blocks (int): Blocks of each stage.
            channels (Sequence[int]): Channels of the stem and the three stages.
            **options: Further ones of a block.
        """
        options.update(conv_cfg=self.conv_cfg, norm_cfg=self.norm_cfg, with_cp=self.with_cp)
        width, *widths = channels
        self.conv1 = self.conv(self.in_channels, width)
        if not self.norm_last:
            self.add_norm(1, width)
        for stage, channel, stride in zip(self.stages, widths, (1, 2, 2), strict=True):
            first = self.block(width, channel, stride, **options)
            others = (self.block(channel, channel, 1, **options) for _ in range(blocks - 1))
            self.add_module(stage, Sequential(first, *others))
            width = channel
        if self.norm_last:
            self.add_norm(1, width)
        self.feat_dim = width
        self.freeze()

    def freeze(self) -> None:
        """Apply ``frozen_stages``."""
        frozen: list[nn.Module] = []
        if self.frozen_stages >= 0:
            frozen.append(self.conv1)
        if self.frozen_stages >= (len(self.stages) if self.norm_last else 0):
            frozen.append(self.norm1)
        for stage in self.stages[: max(self.frozen_stages, 0)]:
            frozen.append(getattr(self, stage))
        for module in frozen:
            module.eval()
            module.requires_grad_(False)

    def train(self, mode: bool = True) -> CifarBackbone:
        """Set the mode, but keep frozen stages and norms in evaluation mode."""
        super().train(mode)
        self.freeze()
        for module in self.modules() if mode and self.norm_eval else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Feature maps of the stages in ``out_indices``."""
        x = self.conv1(x)
        if not self.norm_last:
            x = self.relu(self.norm1(x))
        outs = []
        for index, stage in enumerate(self.stages[: max(self.out_indices) + 1]):
            x = getattr(self, stage)(x)
            if index in self.out_indices:
                last = self.norm_last and index == len(self.stages) - 1
                outs.append(self.relu(self.norm1(x)) if last else x)
        return tuple(outs)


@MODELS.register_module()
class ResNetCifar(CifarBackbone):
    """ResNet-20 to 110 for CIFAR.

    The networks of section 4.2 of `Deep Residual Learning for Image Recognition
    <https://arxiv.org/abs/1512.03385>`_ with parameter-free shortcuts; not
    mmpretrain's ``ResNet_CIFAR``, which is the large ResNet with another stem.
    Names are those of the public weights, apart from their classifier
    ``linear``; ``fgc convert`` converts those. ``GatedResNetCifar`` is the same with gates.

    Args:
        depth (int): 20, 32, 44, 56 or 110.
        base_channels (int): Channels of the first stage, which the next two
            double. Defaults to 16; the last stage, for the head, has 64.
        **options: See :class:`CifarBackbone`.

    Example:
        >>> ResNetCifar(20)(torch.rand(2, 3, 32, 32))[0].shape
        torch.Size([2, 64, 8, 8])
    """

    arch_settings: ClassVar[dict[int, int]] = {20: 3, 32: 5, 44: 7, 56: 9, 110: 18}

    def __init__(self, depth: int, base_channels: int = 16, **options: Any) -> None:
        if depth not in self.arch_settings:
            choices = ', '.join(map(str, self.arch_settings))
            raise UsageError(f'ResNetCifar: depth={depth} must be one of {choices}')
        super().__init__(**options)
        self.depth = depth
        widths = [base_channels * factor for factor in (1, 1, 2, 4)]
        self.add_layers(self.arch_settings[depth], widths)


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
        **options: See :class:`CifarBackbone`.

    Example:
        >>> WideResNet(16, widen_factor=2)(torch.rand(2, 3, 32, 32))[0].shape
        torch.Size([2, 128, 8, 8])
    """

    block = WideBlock
    norm_last = True

    def __init__(
        self, depth: int = 28, widen_factor: float = 10, dropout: float = 0.0, **options: Any
    ) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise UsageError(
                f'WideResNet: depth={depth} must be 6 n + 4, such as 10, 16, 22, 28 or 40'
            )
        if int(16 * widen_factor) < 1:
            raise UsageError(f'WideResNet: widen_factor={widen_factor} must be at least 1/16')
        if not 0 <= dropout < 1:
            raise UsageError(f'WideResNet: dropout={dropout} must be within [0, 1)')
        super().__init__(**options)
        self.depth = depth
        widths = [16, *(int(width * widen_factor) for width in (16, 32, 64))]
        self.add_layers((depth - 4) // 6, widths, dropout=dropout)
