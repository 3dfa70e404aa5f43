# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The controller behind BudgetHook: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from torch import Tensor

from .reading import FARTHEST, Reading

_FASTEST = 0.2
"""Part of the distance to the goal that a step goes until the target is reached."""
_SHARPEST = 0.03
"""Part by which a step may spread the logits."""
_PER_LOGIT = 0.25
"""What the weights change by for every logit shifted. Optimizers of unit steps, such
as Adam, answer to a weight like a switch, so it has to be turned slowly."""
_WIDEST = 0.05
"""Most that validations may correct by. Averaged weights (``EMAHook``) follow those of the
training by many steps, and to chase them would close all gates."""


@dataclass
class BudgetState:
    """What a controller remembers, and a checkpoint holds.

    Attributes:
        start (float, optional): Share at the start of the training.
        push (float): Part of the shift that meets a drift which the weight cannot.
        weight (float): Weight of the expected share in the loss.
        cap_weight (float): Weight of what images execute above the cap.
        expected, hard (float): Smoothed shares.
        doubt (float): Smoothed mean of 4 pi (1 - pi).
        openness (list[float]): Smoothed openness of each gate.
        offset (float): Smoothed share of a batch in evaluation less that in
            training.
        gap (float): Smoothed share in validation less that of the batches, bounded.
        seen, checks, validations (int): Numbers of readings, of batches in
            evaluation and of validations.
    """

    start: Optional[float] = None
    push: float = 0.0
    weight: float = 0.0
    cap_weight: float = 0.0
    expected: float = 0.0
    hard: float = 0.0
    doubt: float = 0.0
    openness: list[float] = field(default_factory=list)
    offset: float = 0.0
    gap: float = 0.0
    seen: int = 0
    checks: int = 0
    validations: int = 0

    @property
    def correction(self) -> float:
        """What to add to the hard share of a batch in training."""
        return self.offset + self.gap

    @property
    def share(self) -> float:
        """Share that evaluation would count now."""
        return self.hard + self.correction


@dataclass
class BudgetController:
    """Holds the executed share of a network on a goal that moves to a target.

    Two actuators work together.

    The fast one shifts the logits of all gates by a small amount in each step, those
    of channels that the task pulls at by less (:class:`TaskPull`).
    How far they are from the goal is read off the batch by trying shifts on it,
    so the loop depends on neither optimizer nor learning rate, and keeps
    its force when the rate has decayed. From the target to the end the gain falls,
    so that the noise of single batches averages out.

    The slow one is the weight of the expected share in the loss, which chooses
    *what* is closed. Every logit shifted down raises it, every logit shifted up
    lowers it, between 0 and ``max_weight``. So it is the integral of the loop: in the
    end the loss holds the balance and the shifts vanish. Two integrals would swing, so
    only where the weight is at a bound, and the optimizer drifts on, one
    of the shifts (``push``) takes its place. It is damped critically, waits while the
    shift is at its own bound, and stays below what a reading can overrule (anti-windup).

    On the way to the target the goal is met by the expected share and at the
    target by the hard one, which evaluation counts: hard decisions of gates
    that all started alike would fall off a cliff. For the same reason logits
    are spread about the threshold while decisions are too unsure
    (:meth:`sharpening`), which changes no hard one.

    Args:
        target (float): Share to end at.
        steps (int): Iterations of the training.
        begin (float): Part of the training after which the goal starts to move.
            Defaults to 0.0.
        reach (float): Part of the training after which it stands at the target.
            Defaults to 0.6.
        floor (float): Least openness of each gate. Defaults to 0.0.
        max_weight (float): Bound of the loss's weight. Defaults to 4.0.
        doubt (float): Mean of 4 pi (1 - pi) above which decisions are made
            surer. Defaults to 0.4.
        max_shift (float): Bound of a step of the logits. Defaults to 0.2.
    """

    target: float
    steps: int
    begin: float = 0.0
    reach: float = 0.6
    floor: float = 0.0
    max_weight: float = 4.0
    doubt: float = 0.4
    max_shift: float = 0.2
    state: BudgetState = field(default_factory=BudgetState)

    def __post_init__(self) -> None:
        # In the end as slow as a time constant of a quarter of what is left allows.
        settling = max(1.0, (1 - self.reach) * self.steps)
        self.slowest = min(_FASTEST, max(_FASTEST / 20, 4 / settling))

    def progress(self, step: int) -> float:
        """How much of the way to the target lies behind, 0 to 1."""
        return _ramp(step / self.steps, self.begin, self.reach)

    def goal(self, step: int) -> Optional[float]:
        """The share the network should be at, None before the first reading."""
        start = self.state.start
        if start is None:
            return None
        return start + self.progress(step) * (self.target - start)

    def falls(self) -> bool:
        """Whether channels are to be closed, and not opened, on the way to the target."""
        return self.state.start is not None and self.state.start > self.target

    def gain(self, step: int) -> float:
        """Part of the distance to the goal that one step goes."""
        done = _ramp(step / self.steps, self.reach, 1.0)
        return _FASTEST ** (1 - done) * self.slowest**done

    def update(
        self, reading: Reading, step: int, speeds: Optional[Sequence[Tensor]] = None
    ) -> list[Any]:
        """Take a reading in.

        Args:
            reading (Reading): Of this iteration, the same on all ranks.
            step (int): Number of the iteration.
            speeds (Sequence[Tensor], optional): How far a shift by 1 moves the
                channels of each gate. Defaults to None, 1 for all.

        Returns:
            list[float | Tensor]: What to add to the logits of each gate; with speeds,
            to that of each channel.
        """
        state, gain = self.state, self.gain(step)
        state.seen += 1
        if state.start is None:
            # The network is where it is: the goal moves from there.
            state.start = reading.expected
        rate = max(gain, 1 / state.seen)
        state.expected += rate * (reading.expected - state.expected)
        state.hard += rate * (reading.hard - state.hard)
        state.doubt += rate * (reading.doubt - state.doubt)
        if not state.openness:
            state.openness = list(reading.openness)
        pairs = zip(state.openness, reading.openness, strict=True)
        state.openness = [old + rate * (new - old) for old, new in pairs]

        shift = state.push + gain * reading.shift
        settled = step >= self.reach * self.steps and abs(shift) < self.max_shift
        if settled and (self._spent(reading.shift) or state.push * reading.shift < 0):
            # Damped critically. Any slower, and what noise has left in it outlives the
            # gain that could take it back.
            state.push += gain**2 / 4 * reading.shift
        most = min(self.max_shift, FARTHEST * gain)
        state.push = min(most, max(-most, state.push))
        state.weight = self._weight(state.weight, -self._bounded(shift))
        # A share above the cap counts like a push down, none like a slow one up.
        over = self.max_shift * (1.0 if reading.over_cap > 0.001 else -0.1)
        state.cap_weight = self._weight(state.cap_weight, over)
        # A gate comes down to its floor, and up to it, by the same law.
        if speeds is None:
            return [self._bounded(max(shift, -gain * room)) for room in reading.room]
        return [
            (shift * speed).clamp(min=-gain * room).clamp(-self.max_shift, self.max_shift)
            for speed, room in zip(speeds, reading.room, strict=True)
        ]

    def sharpening(self) -> float:
        """What to multiply the logits with, 1 if decisions are sure enough."""
        return 1 + _SHARPEST * min(1.0, max(0.0, 2 * (self.state.doubt - self.doubt)))

    def trust(self, step: int) -> float:
        """Weight of the hard share against the expected one."""
        return self.progress(step) ** 2

    def at_floor(self) -> list[bool]:
        """For each gate, whether it must not close further."""
        return [openness < 1.1 * self.floor for openness in self.state.openness]

    def correct(self, difference: float) -> None:
        """Take in by how much evaluation differs from the hard share in training."""
        state = self.state
        state.checks += 1
        state.offset += max(0.3, 1 / state.checks) * (difference - state.offset)

    def validated(self, share: float, step: int) -> None:
        """Take in what a validation counted; on the way to the target too much moves."""
        state = self.state
        if self.progress(step) < 1 or not state.seen:
            return
        state.validations += 1
        gap = state.gap + max(0.5, 1 / state.validations) * (share - state.share)
        state.gap = min(_WIDEST, max(-_WIDEST, gap))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another controller was."""
        self.state = BudgetState(**state)

    def _spent(self, wanted: float) -> bool:
        """Whether the weight has nothing left to give in that direction."""
        weight = self.state.weight
        return weight <= 0 if wanted > 0 else weight >= self.max_weight

    def _bounded(self, shift: float) -> float:
        return min(self.max_shift, max(-self.max_shift, shift))

    def _weight(self, weight: float, pushed: float) -> float:
        """A weight after the logits were pushed down by so much."""
        return min(self.max_weight, max(0.0, weight + _PER_LOGIT * pushed))


def _ramp(x: float, start: float, end: float) -> float:
    """0 before start, 1 after end."""
    if end <= start:
        return float(x >= end)
    return min(1.0, max(0.0, (x - start) / (end - start)))
