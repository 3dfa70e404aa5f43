# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The small ResNets for 32 x 32 pictures, as plain networks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
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

InitCfg = Union[dict, Sequence[dict], None]


class CifarBlock(BaseModule):
    """Two 3x3 convolutions around a shortcut without parameters.

    Where the shape changes, the shortcut takes every ``stride``-th pixel and
    adds zero channels on both sides.

    Args:
        in_channels (int): Channels of the block input.
        channels (int): Channels of both convolutions.
        stride (int): Stride of the first. Defaults to 1.
        conv_cfg (dict, optional): Config of the convolutions. Defaults to None.
        norm_cfg (dict): Config of the norms. Defaults to ``dict(type='BN')``.
        with_cp (bool): Checkpoint the block. Defaults to False.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int = 1,
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN'),
        with_cp: bool = False,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.stride = stride
        self.extra_channels = channels - in_channels
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, channels, postfix=1)
        self.norm2_name, norm2 = build_norm_layer(norm_cfg, channels, postfix=2)
        self.conv1 = build_conv_layer(
            conv_cfg, in_channels, channels, 3, stride=stride, padding=1, bias=False
        )
        self.add_module(self.norm1_name, norm1)
        self.conv2 = build_conv_layer(conv_cfg, channels, channels, 3, padding=1, bias=False)
        self.add_module(self.norm2_name, norm2)
        self.relu = nn.ReLU(inplace=True)

    def shortcut(self, x: Tensor) -> Tensor:
        """The input in the shape of the output."""
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.extra_channels:
            before = self.extra_channels // 2
            x = F.pad(x, (0, 0, 0, 0, before, self.extra_channels - before))
        return x

    def body(self, x: Tensor) -> Tensor:
        """The block."""
        out = self.relu(getattr(self, self.norm1_name)(self.conv1(x)))
        out = getattr(self, self.norm2_name)(self.conv2(out))
        return self.relu(out + self.shortcut(x))

    def forward(self, x: Tensor) -> Tensor:
        """Run the block, checkpointed if asked for."""
        if self.with_cp and x.requires_grad:
            return cp.checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


class CifarBackbone(BaseModule):
    """Three stages of equally many blocks at strides 1, 2, 2; no pooling.

    A subclass hands over the widths and implements :meth:`make_block` and, if need be,
    :meth:`forward_stem`, :meth:`finish` and :meth:`frozen_modules`.

    Args:
        blocks (int): Blocks of each stage.
        channels (Sequence[int]): Channels of the stem and the three stages.
        in_channels (int): Channels of the picture. Defaults to 3.
        out_indices (Sequence[int]): Stages whose output is returned.
            Defaults to ``(2, )``.
        conv_cfg (dict, optional): Config of the convolutions. Defaults to None.
        frozen_stages (int): Stem (0) and stages up to this number are frozen,
            -1 freezes nothing. Defaults to -1.
        norm_eval (bool): Keep batch norm in evaluation mode while training.
            Defaults to False.
        init_cfg (dict | list[dict], optional): Initialization config.
            Defaults to None, which is Kaiming's for the convolutions.
    """

    stages: ClassVar[tuple[str, ...]] = ('layer1', 'layer2', 'layer3')

    def __init__(
        self,
        blocks: int,
        channels: Sequence[int],
        in_channels: int = 3,
        out_indices: Sequence[int] = (2,),
        conv_cfg: Optional[dict] = None,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        init_cfg: InitCfg = None,
    ) -> None:
        usual = [
            dict(type='Kaiming', layer='Conv2d'),
            dict(type='Constant', val=1, layer=['_BatchNorm', 'GroupNorm']),
        ]
        super().__init__(init_cfg=init_cfg or usual)
        name, count = type(self).__name__, len(self.stages)
        if not out_indices or any(index not in range(count) for index in out_indices):
            raise UsageError(f'{name}: out_indices={out_indices} must be some of (0, 1, 2)')
        if frozen_stages not in range(-1, count + 1):
            raise UsageError(
                f'{name}: frozen_stages={frozen_stages} must be from -1 (none) to {count}'
            )
        self.out_indices = tuple(out_indices)
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.make_stem(in_channels, channels[0], conv_cfg)
        width = channels[0]
        for stage, stage_width, stride in zip(self.stages, channels[1:], (1, 2, 2), strict=True):
            layer = []
            for i in range(blocks):
                layer.append(self.make_block(width, stage_width, stride if i == 0 else 1))
                width = stage_width
            self.add_module(stage, Sequential(*layer))
        self.feat_dim = width

    def make_stem(self, in_channels: int, channels: int, conv_cfg: Optional[dict]) -> None:
        """Add what comes before the stages."""
        self.conv1 = build_conv_layer(conv_cfg, in_channels, channels, 3, padding=1, bias=False)

    @abstractmethod
    def make_block(self, in_channels: int, channels: int, stride: int) -> nn.Module:
        """Build one block."""

    def forward_stem(self, x: Tensor) -> Tensor:
        """Run what comes before the stages."""
        return self.conv1(x)

    def finish(self, x: Tensor) -> Tensor:
        """Run what comes after the last stage."""
        return x

    def frozen_modules(self) -> Iterator[nn.Module]:
        """Stem, then the stages up to ``frozen_stages``."""
        if self.frozen_stages >= 0:
            yield self.conv1
        for stage in self.stages[: max(self.frozen_stages, 0)]:
            yield getattr(self, stage)

    def freeze(self) -> None:
        """Apply ``frozen_stages``."""
        for module in self.frozen_modules():
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
        x = self.forward_stem(x)
        outs = []
        for index, stage in enumerate(self.stages[: max(self.out_indices) + 1]):
            x = getattr(self, stage)(x)
            if index in self.out_indices:
                last = index == len(self.stages) - 1
                outs.append(self.finish(x) if last else x)
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
        in_channels (int): Channels of the picture. Defaults to 3.
        base_channels (int): Channels of the first stage, which the next two
            double. Defaults to 16.
        out_indices (Sequence[int]): Stages whose output is returned.
            Defaults to ``(2, )``, for ``GlobalAveragePooling`` and a linear
            head of 64 channels.
        conv_cfg (dict, optional): Config of the convolutions. Defaults to None.
        norm_cfg (dict): Config of the norms. Defaults to ``dict(type='BN')``.
        frozen_stages (int): See :class:`CifarBackbone`. Defaults to -1.
        norm_eval (bool): Likewise. Defaults to False.
        with_cp (bool): Checkpoint the blocks. Defaults to False.
        init_cfg (dict | list[dict], optional): Initialization config. Defaults to None.

    Example:
        >>> ResNetCifar(20)(torch.rand(2, 3, 32, 32))[0].shape
        torch.Size([2, 64, 8, 8])
    """

    arch_settings: ClassVar[dict[int, int]] = {20: 3, 32: 5, 44: 7, 56: 9, 110: 18}

    def __init__(
        self,
        depth: int,
        in_channels: int = 3,
        base_channels: int = 16,
        out_indices: Sequence[int] = (2,),
        conv_cfg: Optional[dict] = None,
        norm_cfg: dict = dict(type='BN'),
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        init_cfg: InitCfg = None,
    ) -> None:
        if depth not in self.arch_settings:
            choices = ', '.join(map(str, self.arch_settings))
            raise UsageError(f'ResNetCifar: depth={depth} must be one of {choices}')
        # Needed before nn.Module is set up: plain values only.
        self.cfg: dict[str, Any] = dict(conv_cfg=conv_cfg, norm_cfg=norm_cfg, with_cp=with_cp)
        width = base_channels
        channels = (width, width, 2 * width, 4 * width)
        super().__init__(
            self.arch_settings[depth],
            channels,
            in_channels,
            out_indices,
            conv_cfg,
            frozen_stages,
            norm_eval,
            init_cfg,
        )
        self.depth = depth
        self.freeze()

    def make_stem(self, in_channels: int, channels: int, conv_cfg: Optional[dict]) -> None:
        super().make_stem(in_channels, channels, conv_cfg)
        self.norm1_name, norm1 = build_norm_layer(self.cfg['norm_cfg'], channels, postfix=1)
        self.add_module(self.norm1_name, norm1)
        self.relu = nn.ReLU(inplace=True)

    def make_block(self, in_channels: int, channels: int, stride: int) -> nn.Module:
        return CifarBlock(in_channels, channels, stride, **self.cfg)

    def forward_stem(self, x: Tensor) -> Tensor:
        return self.relu(getattr(self, self.norm1_name)(self.conv1(x)))

    def frozen_modules(self) -> Iterator[nn.Module]:
        yield from super().frozen_modules()
        if self.frozen_stages >= 0:
            yield getattr(self, self.norm1_name)
