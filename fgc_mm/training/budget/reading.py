# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a batch says about the cost of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from mmengine.dist import all_reduce
from torch import Tensor

from ...gates.bin_concrete import logit_of
from ...macs import BackboneShare

FARTHEST = 2.0
"""Logits a reading can say to go, to either side."""
_HALVINGS = 12
_FAR = 8.0
"""Logit at which a channel is open, or closed, in all but one of 3,000 samples."""


@dataclass
class Reading:
    """What one batch of all ranks says.

    Attributes:
        expected (float): Expected share, from the probabilities.
        hard (float): Share if every probability above the threshold is open.
        shift (float): What to add to all logits, each times its speed, for this
            batch to be on the goal, within +-2.
        doubt (float): Mean of 4 pi (1 - pi) over images and channels: 0 if all
            decisions are sure, 1 if all are tosses.
        over_cap (float): Mean of what images execute above the cap.
        openness (list[float]): Hard openness of each gate.
        room (list[float]): How far the logits of each gate may come down until
            it is at its floor; negative if it is below.
        lowest, highest (Tensor): Of each gate's channels, one gate behind the
            other, the least and the greatest logit of an image, from the threshold on.
    """

    expected: float
    hard: float
    shift: float
    doubt: float
    over_cap: float
    openness: list[float]
    room: list[float]
    lowest: Tensor
    highest: Tensor

    @classmethod
    def of_ranks(cls, report: Tensor, gates: int) -> Reading:
        """The reports of all ranks (:meth:`BatchReader.report`) as one reading, the same on
        each."""
        sums, extremes = report.double().tensor_split([6 + 2 * gates])
        all_reduce(sums)
        all_reduce(extremes, 'max')
        expected, hard, shift, doubt, over_cap, *rest = (sums[1:] / sums[0]).tolist()
        lowest, highest = extremes.float().chunk(2)
        each = rest[:gates], rest[gates:]
        return cls(expected, hard, shift, doubt, over_cap, *each, -lowest, highest)

    def harmless(self, moves: Sequence[Any], sizes: Sequence[int]) -> list[Tensor]:
        """The same moves of the logits, a number or one for each channel of a gate, but channels
        that lie far on that side already, whatever the image, stay: they would be lost for good,
        and nothing is gained.

        Images say so, and no parameter: what a bias gives the norm before can take.
        """
        pairs = zip(self.lowest.split(list(sizes)), self.highest.split(list(sizes)), strict=True)
        return [
            torch.where((move < 0) & (high <= -_FAR) | (move > 0) & (low >= _FAR), 0.0, move)
            for move, (low, high) in zip(moves, pairs, strict=True)
        ]


class BatchReader:
    """Prices the decisions of one batch, and those after a shift of the logits.

    Args:
        share (BackboneShare): Of the pass the logits are from.
        logits (list[Tensor]): Decisions x C for each gate, in the order of
            ``share.gates``, without a graph: one decision for each image, or several for levels
            and regions.
        fixed (list[bool]): Gates that a shift does not move.
        floor (float): Least openness of each gate. Defaults to 0.0.
        speeds (list[Tensor], optional): C for each gate, how far a shift by 1
            moves its channels. Defaults to None, 1 for all.
    """

    def __init__(
        self,
        share: BackboneShare,
        logits: list[Tensor],
        fixed: list[bool],
        floor: float = 0.0,
        speeds: Optional[list[Tensor]] = None,
    ) -> None:
        self.share = share
        cuts = [logit_of(getattr(gate, 'threshold', 0.5)) for gate in share.gates.values()]
        self.room = torch.full((len(logits),), 2 * FARTHEST).to(logits[0])
        if floor:
            tops = [a.float().flatten().quantile(1 - floor) for a in logits]
            self.room = torch.stack(tops) - self.room.new_tensor(cuts)
        # Gates with as many decisions are read together.
        members: dict[int, list[int]] = {}
        for number, rows in enumerate(logits):
            members.setdefault(len(rows), []).append(number)
        self._groups = [
            _Group(numbers, logits, cuts, fixed, self.room, speeds) for numbers in members.values()
        ]
        hard = self._by_gate([group.hard(group.logits) for group in self._groups])
        self.openness = torch.stack([rows.mean() for rows in hard])
        self.hard = share.of(hard)
        probs = [group.logits.sigmoid() for group in self._groups]
        self.expected = share.of(self._soft(probs))
        values = torch.cat([p.flatten() for p in probs])
        self.doubt = (4 * values * (1 - values)).mean()

    def _by_gate(self, openness: Sequence[Tensor]) -> list[Tensor]:
        """Openness of groups as one row of numbers for each gate."""
        found: dict[int, Tensor] = {}
        for group, columns in zip(self._groups, openness, strict=True):
            found.update(zip(group.numbers, columns.unbind(dim=1), strict=True))
        return [found[number] for number in range(len(found))]

    def _soft(self, probs: Sequence[Tensor]) -> list[Tensor]:
        return self._by_gate([p @ g.mean for p, g in zip(probs, self._groups, strict=True)])

    def solve(self, goal: float, trust: float, offset: float) -> Tensor:
        """The shift that brings this batch to the goal, by halving; nothing leaves the device.

        ``trust`` is the weight of the hard share, with the offset added, against the expected one.
        """
        low = self.room.new_tensor(-FARTHEST)
        high = self.room.new_tensor(FARTHEST)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            moved = [group.moved(middle) for group in self._groups]
            hard = [group.hard(x) for group, x in zip(self._groups, moved, strict=True)]
            found = trust * (self.share.of(self._by_gate(hard)).mean() + offset)
            if trust < 1:
                soft = self.share.of(self._soft([x.sigmoid() for x in moved])).mean()
                found = found + (1 - trust) * soft
            above = found > goal
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return (low + high) / 2

    def report(self, shift: Tensor, cap: Optional[float], offset: float) -> Tensor:
        """Everything in a :class:`Reading`, weighted with the number of images but for
        the extremes at the end."""
        over = torch.zeros_like(self.hard)
        if cap is not None:
            over = (self.hard + offset - cap).clamp(min=0)
        figures = [self.expected.mean(), self.hard.mean(), shift, self.doubt, over.mean()]
        row = torch.cat([torch.stack(figures), self.openness, self.room])
        row = len(self.hard) * torch.cat([torch.ones_like(row[:1]), row])
        lowest: dict[int, Tensor] = {}
        highest: dict[int, Tensor] = {}
        for group in self._groups:
            beyond = group.logits - group.cuts
            for found, ends in ((lowest, -beyond.amin(dim=0)), (highest, beyond.amax(dim=0))):
                found.update(zip(group.numbers, ends.split(group.channels), strict=True))
        order = range(len(lowest))
        return torch.cat([row, *(lowest[n] for n in order), *(highest[n] for n in order)])


class _Group:
    """Gates with the same number of decisions, their channels beside each other: of each the logit
    of its threshold, whether and how far a shift by 1 moves it, and how far down at most."""

    def __init__(
        self,
        numbers: list[int],
        logits: list[Tensor],
        cuts: list[float],
        fixed: list[bool],
        room: Tensor,
        speeds: Optional[list[Tensor]],
    ) -> None:
        self.numbers = numbers
        self.logits = torch.cat([logits[n] for n in numbers], dim=1)
        channels = torch.tensor([logits[n].size(1) for n in numbers])
        self.channels = channels.tolist()
        owner = torch.arange(len(numbers)).repeat_interleave(channels)
        mean = torch.zeros(len(owner), len(numbers))
        mean[torch.arange(len(owner)), owner] = 1 / channels[owner]
        # From channels to the openness of the gates.
        self.mean = mean.to(self.logits)
        self.cuts = self.logits.new_tensor([cuts[n] for n in numbers])[owner]
        self.moves = 1 - torch.tensor([fixed[n] for n in numbers]).to(self.logits)[owner]
        self.speeds = torch.ones_like(self.moves)
        if speeds is not None:
            self.speeds = torch.cat([speeds[n] for n in numbers])
        self.least = -room[numbers][owner]

    def hard(self, logits: Tensor) -> Tensor:
        """Decisions x gates: the open part of the channels."""
        return (logits > self.cuts).to(logits) @ self.mean

    def moved(self, shift: Tensor) -> Tensor:
        """The logits after a shift."""
        return self.logits + torch.maximum(shift * self.speeds, self.least) * self.moves
