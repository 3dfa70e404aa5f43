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

    def harmless(self, moves: Sequence[Any], sizes: Sequence[int]) -> list[Tensor]:
        """The same moves, but channels that lie far on that side already, whatever the
        image, stay: they would be lost for good, and nothing is gained.

        Images say so, and no parameter: what a bias gives the norm before can take.

        Args:
            moves (Sequence[float | Tensor]): What is to be added to the logits of each
                gate, or to that of each of its channels.
            sizes (Sequence[int]): Channels of each gate.
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
        logits (list[Tensor]): B x C for each gate, in the order of
            ``share.gates``, without a graph.
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
        self.logits = torch.cat(logits, dim=1)
        channels = torch.tensor([a.size(1) for a in logits])
        owner = torch.arange(len(logits)).repeat_interleave(channels)
        mean = torch.zeros(len(owner), len(logits))
        mean[torch.arange(len(owner)), owner] = 1 / channels[owner]
        self._mean = mean.to(self.logits)
        self._moves = 1 - torch.tensor(fixed).to(self.logits)[owner]
        self._speeds = torch.ones_like(self._moves) if speeds is None else torch.cat(speeds)
        cuts = [logit_of(getattr(gate, 'threshold', 0.5)) for gate in share.gates.values()]
        self._cuts = self.logits.new_tensor(cuts)[owner]
        self.room = self.logits.new_full((len(logits),), 2 * FARTHEST)
        if floor:
            tops = [a.float().flatten().quantile(1 - floor) for a in logits]
            self.room = torch.stack(tops) - self.room.new_tensor(cuts)
        self._least = -self.room[owner]
        self.openness = self._hard(self.logits)
        self.hard = share.of(self.openness)
        probs = self.logits.sigmoid()
        self.expected = share.of(probs @ self._mean)
        self.doubt = (4 * probs * (1 - probs)).mean()

    def solve(self, goal: float, trust: float, offset: float) -> Tensor:
        """The shift that brings this batch to the goal, by halving.

        Args:
            goal (float): The share wanted.
            trust (float): Weight of the hard share against the expected one.
            offset (float): Added to the hard share.

        Returns:
            Tensor: A scalar; nothing leaves the device.
        """
        low = self.logits.new_tensor(-FARTHEST)
        high = self.logits.new_tensor(FARTHEST)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            moved = self.logits + torch.maximum(middle * self._speeds, self._least) * self._moves
            found = trust * (self.share.of(self._hard(moved)).mean() + offset)
            if trust < 1:
                soft = self.share.of(moved.sigmoid() @ self._mean).mean()
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
        row = torch.cat([torch.stack(figures), self.openness.mean(dim=0), self.room])
        row = len(self.logits) * torch.cat([torch.ones_like(row[:1]), row])
        beyond = self.logits - self._cuts
        return torch.cat([row, -beyond.amin(dim=0), beyond.amax(dim=0)])

    def _hard(self, logits: Tensor) -> Tensor:
        return (logits > self._cuts).to(logits) @ self._mean


def join(report: Tensor, gates: int) -> Reading:
    """The reports of all ranks as one reading, the same on each.

    Args:
        report (Tensor): Of this rank.
        gates (int): How many gates it is about.
    """
    sums, extremes = report.double().tensor_split([6 + 2 * gates])
    all_reduce(sums)
    all_reduce(extremes, 'max')
    expected, hard, shift, doubt, over_cap, *rest = (sums[1:] / sums[0]).tolist()
    lowest, highest = extremes.float().chunk(2)
    return Reading(
        expected, hard, shift, doubt, over_cap, rest[:gates], rest[gates:], -lowest, highest
    )
