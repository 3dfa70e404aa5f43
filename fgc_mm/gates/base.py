# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The protocol every gate follows."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Optional, Union

import torch
from mmengine.model import BaseModule
from torch import Tensor

from ..errors import UsageError
from .record import GateRecord

OptDict = Optional[dict]
# Not in torch 2.1.
_is_compiling = getattr(torch.compiler, 'is_compiling', lambda: False)


class Gate(BaseModule):
    """Decides per image which channels of one convolution are computed.

    Before the module runs whose input it reads, a hook calls :meth:`pool` on that input and
    :meth:`forward` on what is pooled, which leaves ``self.record``. Layers that read the gated
    channels multiply them with ``self.multiplier``. See :mod:`fgc_mm.sites.forward_hooks`.

    A new gate implements :meth:`decide` and :meth:`reset_parameters`, and
    :meth:`pool` if it reads anything but the mean of the block input.

    Args:
        in_channels (int): Channels of the block input.
        channels (int): Channels of the gated feature.
        init_cfg (dict, optional): Initialization config. Defaults to None.

    Attributes:
        hard (bool): Whether features are multiplied with 0 and 1 only, so that
            nothing is left to multiply once closed channels are left out.
        multiplier (Tensor, optional): What consumers are multiplied with in this pass.
        wants_feature (bool): Whether somebody needs the pooled feature of every pass.
        calls (int): How often it decides in a pass: a head decides anew for each pyramid level.
        regions (bool): Whether it decides for regions of pictures and not for pictures.
        records (list[GateRecord]): Those of all calls of a pass, if there are several;
            ``record`` is the last.
        block (str, optional): Name of the block whose input it reads, seen from the network whose
            child ``gates`` holds it. None for a gate that is on no site.
    """

    hard: bool = False

    def __init__(self, in_channels: int, channels: int, init_cfg: OptDict = None) -> None:
        super().__init__(init_cfg=init_cfg)
        if in_channels < 1 or channels < 1:
            raise UsageError(
                f'{type(self).__name__}: in_channels={in_channels} and channels={channels} '
                'must both be at least 1'
            )
        self.in_channels = in_channels
        self.channels = channels
        self.record: Optional[GateRecord] = None
        self.records: list[GateRecord] = []
        self.calls = 1
        self.regions = False
        self.multiplier: Optional[Tensor] = None
        self.wants_feature = False
        self.block: Optional[str] = None
        self.forced: Union[float, Tensor, None] = None

    @abstractmethod
    def decide(self, pooled: Tensor) -> tuple[Tensor, GateRecord]:
        """Decide for a batch of pooled inputs.

        Args:
            pooled (Tensor): B x in_channels, in the type of the parameters.

        Returns:
            tuple: What the feature is multiplied with (B x channels,
            differentiable in training), and the record of the decision.
        """

    def reset_parameters(self) -> None:
        """Set the gate's own initial values, in ``__init__`` and ``init_weights``."""

    def shift(self, amount: Union[float, Tensor]) -> None:
        """Add to all logits, or to that of each channel: what a controller of the cost turns.

        Only gates whose openness is learned have it.
        """
        raise self._not_learned()

    def sharpen(self, factor: float) -> None:
        """Multiply all logits, seen from that of the threshold: decisions get surer, and none
        changes."""
        raise self._not_learned()

    def _not_learned(self) -> UsageError:
        return UsageError(
            f'{type(self).__name__} has no logits a budget could move: its openness is not '
            'learned; use BinConcreteGate, or implement shift and sharpen'
        )

    @classmethod
    def shiftable(cls) -> bool:
        """Whether this kind of gate implements :meth:`shift` and :meth:`sharpen`."""
        return cls.shift is not Gate.shift

    def init_weights(self) -> None:
        """Called by the backbone's ``init_weights``, whose rules for linear and
        norm layers must not wipe the gate's own."""
        if self.init_cfg is None and not self.is_init:
            self.reset_parameters()
        super().init_weights()

    def pool(self, x: Tensor) -> Tensor:
        """Mean over the positions, B x in_channels, float32 under autocast too."""
        half = x.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else None
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        if last and x.size(2) * x.size(3) >= 1024:
            # One dimension is reduced faster than two.
            return x.permute(0, 2, 3, 1).flatten(1, 2).mean(dim=1, dtype=dtype)
        return x.mean(dim=(2, 3), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Decide on a block input, pooled or not, and leave ``self.record``; the multiplier."""
        return self.settle(*self.decision(x))

    def decision(self, x: Tensor) -> tuple[Tensor, GateRecord]:
        """Decide without leaving a record, for tracers and several threads."""
        if x.dim() == 4:
            x = self.pool(x)
        if x.dim() != 2 or x.size(1) != self.in_channels:
            raise UsageError(
                f'{type(self).__name__}: an input of shape {tuple(x.shape)} does not fit '
                f'in_channels={self.in_channels}'
            )
        dtype = torch.float32
        for parameter in self.parameters():  # torch.compile cannot trace next()
            dtype = parameter.dtype
            break
        with torch.autocast(x.device.type, enabled=False):
            return self.impose(*self.decide(x.to(dtype)))

    def impose(self, multiplier: Tensor, record: GateRecord) -> tuple[Tensor, GateRecord]:
        """A decision, or in its place that of ``forced`` if there is one."""
        if self.forced is not None:
            like = record.mask
            forced = torch.as_tensor(self.forced, dtype=like.dtype, device=like.device)
            multiplier = forced.expand_as(like)
            record = GateRecord(record.logits, record.probs, multiplier)
        return multiplier, record

    def settle(self, multiplier: Tensor, record: GateRecord) -> Tensor:
        """Keep the record of a decision, and hand its multiplier on."""
        if self.calls > 1:
            new = self.record is None or len(self.records) >= self.calls
            self.records = [record] if new else [*self.records, record]
        self.record = record
        if record.logits.requires_grad and not _is_compiling():
            # Once the gradient has passed here nobody needs the graph any more:
            # a record must not keep the activations of a step alive.
            record.logits.register_hook(_Release(record))
        return multiplier

    @property
    def pass_records(self) -> list[GateRecord]:
        """What it decided in the whole pass, call by call; none if it did not run."""
        if self.record is None:
            return []
        return self.records if self.calls > 1 else [self.record]

    @property
    def pass_record(self) -> Optional[GateRecord]:
        """The same as one record, the calls below each other; None if it did not run."""
        records = self.pass_records
        return GateRecord.joined(records) if len(records) > 1 else self.record

    @property
    def once_per_picture(self) -> bool:
        """Whether it decides for each picture just once in a pass."""
        return self.calls == 1 and not self.regions

    def slim_state(self, kept: Tensor, always: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        """State of a gate over fewer channels, some of them open for good.

        Args:
            kept (Tensor): Numbers of the channels that are left.
            always (Tensor): For each of them, whether it is always open.
            inputs (Tensor): Numbers of the channels that are left of what it reads; the others
                were zero.

        Returns:
            dict[str, Tensor]: What the smaller gate holds.
        """
        raise UsageError(
            f'{type(self).__name__} cannot be slimmed: it does not say how it decides over fewer '
            'channels; use BinConcreteGate, or implement slim_state'
        )

    def note_feature(self, pooled_feature: Tensor) -> None:
        """Add the pooled ungated feature of this pass to the record."""
        if self.record is not None:
            self.record.feature = pooled_feature.detach()

    def __getstate__(self) -> dict:
        # A record belongs to one pass: copies and pickles start without.
        return {**self.__dict__, 'record': None, 'records': [], 'multiplier': None}

    def extra_repr(self) -> str:
        return f'in_channels={self.in_channels}, channels={self.channels}'


class _Release:
    """Tensor hook that drops the graph of a record after its gradient."""

    def __init__(self, record: GateRecord) -> None:
        # A strong reference would be a cycle through the graph.
        self.record = weakref.ref(record)

    def __call__(self, grad: Tensor) -> None:
        record = self.record()
        if record is not None:
            record.logits = record.logits.detach()
            record.probs = record.probs.detach()
