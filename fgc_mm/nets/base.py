# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What all gated backbones have in common."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Optional, Union

import torch.nn as nn
from mmengine.model import BaseModule
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError
from ..gates import find_gates, match_blocks
from ..gates.missing_keys import report_missing
from ..gates.utils import Layers
from .block import GatedBlock, InitCfg, PlainLayer


class GatedBackbone(BaseModule):
    """Base of the gated backbones: which blocks are gated, freezing, weights.

    A subclass calls :meth:`set_blocks` with the names of all its blocks, builds
    each block with ``gate=self.gate_of(name)``, uses mmengine's ``Sequential``
    for stages (so that ``init_weights`` reaches the gates), implements
    :meth:`frozen_modules` and ends its ``__init__`` with
    ``self._freeze_stages()``.

    Args:
        gate (dict, optional): Config of the gates; None builds the dense
            network. Defaults to ``dict(type='BinConcreteGate')``.
        gated_blocks (str | Sequence): ``'all'``, ``'last_stage'``, or names of
            stages (``'layer4'``), names (``'layer3.1'``) or indices (-1 the
            last) of blocks. Defaults to 'all'.
        gated_convs (str | Sequence[str], optional): Which convolutions of a
            block are gated, ``'conv1'`` and so on, or of a single block,
            ``'layer1.0.conv1'``; None or ``'all'`` means all that can be.
            Defaults to None.
        widths (dict, optional): Channels of single convolutions that can be
            gated, by name, such as ``{'layer1.0.conv1': 37}``; what
            ``tools/slim.py`` leaves of a network. Defaults to None.
        frozen_stages (int): Stem (0) and stages up to this number are frozen,
            -1 freezes nothing. Defaults to -1.
        norm_eval (bool): Keep batch norm in evaluation mode while training.
            Defaults to False.
        with_cp (bool): Checkpoint the blocks. Defaults to False.
        gates_follow_freeze (bool): Apply ``frozen_stages`` and ``norm_eval`` to
            gates as well. Defaults to False: gates learn.
        pretrained (str, optional): Weights to start from, the same as
            ``init_cfg=dict(type='Pretrained', checkpoint=...)``.
            Defaults to None.
        init_cfg (dict | list[dict], optional): Initialization config.
            Defaults to None, which takes ``default_init_cfg``.
    """

    default_init_cfg: ClassVar[list[dict]] = [
        dict(type='Kaiming', layer='Conv2d'),
        dict(type='Constant', val=1, layer=['_BatchNorm', 'GroupNorm']),
    ]
    gateable_convs: tuple[str, ...] = ('conv1',)

    def __init__(
        self,
        gate: Optional[dict] = dict(type='BinConcreteGate'),
        gated_blocks: Layers = 'all',
        gated_convs: Union[str, Sequence[str], None] = None,
        widths: Optional[Mapping[str, int]] = None,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        gates_follow_freeze: bool = False,
        pretrained: Optional[str] = None,
        init_cfg: InitCfg = None,
    ) -> None:
        name = type(self).__name__
        if pretrained is not None:
            if not isinstance(pretrained, str):
                raise UsageError(f'{name}: pretrained={pretrained!r} must be a str or None')
            if init_cfg:
                raise UsageError(f'{name}: give either pretrained={pretrained!r} or init_cfg')
            init_cfg = dict(type='Pretrained', checkpoint=pretrained)
        super().__init__(init_cfg=init_cfg or self.default_init_cfg)
        self.from_scratch = not init_cfg
        if gate is not None and (not isinstance(gate, dict) or 'type' not in gate):
            raise UsageError(
                f"{name}: gate={gate!r} must be a dict such as dict(type='BinConcreteGate'), or "
                'None for the dense network'
            )
        self.gate = copy.deepcopy(gate)
        self.gated_blocks = gated_blocks
        gated_convs = 'all' if gated_convs is None else gated_convs
        self.gated_convs = (gated_convs,) if isinstance(gated_convs, str) else tuple(gated_convs)
        self.widths = dict(widths or {})
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.with_cp = with_cp
        self.gates_follow_freeze = gates_follow_freeze
        self.block_names: list[str] = []
        self.gated_block_names: list[str] = []

    def set_blocks(
        self, names: Sequence[str], gateable_convs: Optional[Sequence[str]] = None
    ) -> None:
        """Tell the names of all blocks, before they are built.

        Args:
            names (Sequence[str]): ``'layer1.0'`` and so on, in network order.
            gateable_convs (Sequence[str], optional): Convolutions of a block
                that can be gated. Defaults to None, the class's own.
        """
        if gateable_convs is not None:
            self.gateable_convs = tuple(gateable_convs)
        self.block_names = list(names)
        if self.gated_convs == ('all',):
            self.gated_convs = self.gateable_convs
        every = [f'{block}.{conv}' for block in names for conv in self.gateable_convs]
        if not self.gated_convs or not set(self.gated_convs) <= {*self.gateable_convs, *every}:
            raise UsageError(
                f'{type(self).__name__}: gated_convs={self.gated_convs} must be some of '
                f'{self.gateable_convs}, or of a single block such as {every[0]!r}'
            )
        for name, width in self.widths.items():
            if name not in every or not isinstance(width, int) or width < 1:
                raise UsageError(
                    f'{type(self).__name__}: widths[{name!r}]={width!r} must be a number of '
                    f'channels of a convolution that can be gated, such as {every[0]!r}: 16'
                )
        if self.gate is not None:
            self.gated_block_names = match_blocks(self.gated_blocks, names, 'gated_blocks')

    def gate_of(self, block_name: str, conv: Optional[str] = None) -> Optional[dict]:
        """Config of the gate of a convolution, None if it has none.

        Args:
            block_name (str): Name of the block.
            conv (str, optional): Name of the convolution in it. Defaults to
                None, the only one that can be gated.
        """
        conv = self.gateable_convs[0] if conv is None else conv
        named = {conv, f'{block_name}.{conv}'} & set(self.gated_convs)
        return self.gate if block_name in self.gated_block_names and named else None

    def width_of(self, block_name: str, conv: Optional[str] = None) -> Optional[int]:
        """Channels of a convolution, None if ``widths`` does not name it.

        Args:
            block_name (str): Name of the block.
            conv (str, optional): Name of the convolution in it. Defaults to
                None, the only one that can be gated.
        """
        conv = self.gateable_convs[0] if conv is None else conv
        return self.widths.get(f'{block_name}.{conv}')

    def conv_of(self, gate: str) -> str:
        """Name of a gate's convolution in ``gated_convs`` and ``widths``.

        Args:
            gate (str): ``'gate1'`` and so on.
        """
        return self.gateable_convs[int(gate.removeprefix('gate')) - 1]

    def plain_layers(self) -> list[PlainLayer]:
        """The layers outside of blocks."""
        return []

    def private_inputs(self) -> list[GatedBlock]:
        """The blocks whose input comes from another block and goes nowhere else."""
        return []

    @abstractmethod
    def frozen_modules(self) -> Iterable[nn.Module]:
        """The modules ``frozen_stages`` freezes."""

    def _freeze_stages(self) -> None:
        exempt = [] if self.gates_follow_freeze else list(find_gates(self).values())
        spared = {id(param) for gate in exempt for param in gate.parameters()}
        for module in self.frozen_modules():
            module.eval()
            for param in module.parameters():
                if id(param) not in spared:
                    param.requires_grad = False
        for gate in exempt:
            gate.train(self.training)

    def train(self, mode: bool = True) -> GatedBackbone:
        """Set the mode, but keep frozen stages and norms in evaluation mode."""
        super().train(mode)
        self._freeze_stages()
        if mode and self.norm_eval:
            exempt = [] if self.gates_follow_freeze else list(find_gates(self).values())
            spared = {id(module) for gate in exempt for module in gate.modules()}
            for module in self.modules():
                if isinstance(module, _BatchNorm) and id(module) not in spared:
                    module.eval()
        return self

    def init_weights(self) -> None:
        """Initialize, and say which weights a checkpoint did not bring."""
        handle = self.register_load_state_dict_post_hook(report_missing)
        try:
            super().init_weights()
        finally:
            handle.remove()
