# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The controller behind BudgetHook: numbers in, numbers out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from .budget_reading import Reading


@dataclass
class BudgetState:
    """What a controller remembers, and a checkpoint holds.

    Attributes:
        start (float, optional): Share at the start of the training.
        weight (float): Weight of the expected share in the loss.
        cap_weight (float): Weight of what images execute above the cap.
        expected, hard (float): Smoothed shares.
        shift (float): Smoothed shift of the logits.
        doubt (float): Smoothed mean of 4 pi (1 - pi).
        openness (list[float]): Smoothed openness of each gate.
        offset (float): Smoothed share in evaluation less that in training.
        seen, checks (int): Numbers of readings and of evaluations.
    """

    start: Optional[float] = None
    weight: float = 0.0
    cap_weight: float = 0.0
    expected: float = 0.0
    hard: float = 0.0
    shift: float = 0.0
    doubt: float = 0.0
    openness: list[float] = field(default_factory=list)
    offset: float = 0.0
    seen: int = 0
    checks: int = 0


@dataclass
class BudgetController:
    """Holds the executed share of a network on a goal that moves to a target.

    Two actuators work together. The fast one shifts the logits of all gates by
    a small amount in each step. What it needs is read off the batch, so it does
    not depend on optimizer and learning rate, cannot wind up, and keeps its
    force when the learning rate has decayed. The slow one is the weight of the
    expected share in the loss, which chooses *what* is closed: it rises while
    the fast one has to push down, falls while it has to push up, and stops at a
    bound, so in the end the loss holds the balance and the shifts vanish.

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
    """

    target: float
    steps: int
    begin: float = 0.0
    reach: float = 0.6
    floor: float = 0.0
    max_weight: float = 4.0
    doubt: float = 0.4
    state: BudgetState = field(default_factory=BudgetState)

    def __post_init__(self) -> None:
        ramp = max(1.0, (self.reach - self.begin) * self.steps)
        self.pace = 1 / ramp
        self.gain = min(0.2, max(0.01, 30 * self.pace))
        self.max_shift = min(0.1, max(0.002, 30 * self.pace))

    def progress(self, step: int) -> float:
        """How much of the way to the target lies behind, 0 to 1."""
        if self.reach <= self.begin:
            return 1.0
        return min(1.0, max(0.0, (step / self.steps - self.begin) / (self.reach - self.begin)))

    def goal(self, step: int) -> Optional[float]:
        """The share the network should be at, None before the first reading."""
        start = self.state.start
        if start is None:
            return None
        return start + self.progress(step) * (self.target - start)

    def update(self, reading: Reading, step: int) -> list[float]:
        """Take a reading in.

        Args:
            reading (Reading): Of this iteration, the same on all ranks.
            step (int): Number of the iteration.

        Returns:
            list[float]: What to add to the logits of each gate.
        """
        state = self.state
        state.seen += 1
        if state.start is None:
            # The network is where it is: the goal moves from there.
            state.start = reading.expected
        rate = max(self.gain, 1 / state.seen)
        state.expected += rate * (reading.expected - state.expected)
        state.hard += rate * (reading.hard - state.hard)
        state.doubt += rate * (reading.doubt - state.doubt)
        if not state.openness:
            state.openness = list(reading.openness)
        pairs = zip(state.openness, reading.openness, strict=True)
        state.openness = [old + rate * (new - old) for old, new in pairs]
        shift = self._step(reading.shift)
        state.shift += rate * (shift - state.shift)
        # The weight passes through its whole range in one ramp of full effort.
        effort = -state.shift / self.max_shift
        state.weight += self.max_weight * self.pace * effort
        state.weight = min(self.max_weight, max(0.0, state.weight))
        state.cap_weight += self.max_weight * self.pace * (3 if reading.over_cap > 0.001 else -1)
        state.cap_weight = min(self.max_weight, max(0.0, state.cap_weight))
        # A gate comes down to its floor, and up to it, by the same law.
        return [self._step(max(reading.shift, -room)) for room in reading.room]

    def sharpening(self) -> float:
        """What to multiply the logits with, 1 if decisions are sure enough."""
        return 1 + self.max_shift * min(1.0, max(0.0, 2 * (self.state.doubt - self.doubt)))

    def trust(self, step: int) -> float:
        """Weight of the hard share against the expected one."""
        return self.progress(step) ** 2

    def at_floor(self) -> list[bool]:
        """For each gate, whether it must not close further."""
        return [openness < 1.1 * self.floor for openness in self.state.openness]

    def _step(self, distance: float) -> float:
        return min(self.max_shift, max(-self.max_shift, self.gain * distance))

    def correct(self, difference: float) -> None:
        """Take in by how much evaluation differs from the hard share in training."""
        state = self.state
        state.checks += 1
        state.offset += max(0.2, 1 / state.checks) * (difference - state.offset)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another controller was."""
        self.state = BudgetState(**state)
