# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The controller behind a budget: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Optional

from torch import Tensor

from ...errors import UsageError
from .reading import FARTHEST, Reading

_FASTEST = 0.2
"""Part of the distance to the goal that a step goes until the target is reached."""
_DOUBT = 0.4
"""Mean of 4 pi (1 - pi) above which decisions are made surer."""
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
        weight, cap_weight (float): Weights in the loss of the expected share, and of what images
            execute above the cap.
        expected, hard, doubt, openness: Those of the readings, smoothed.
        offset (float): Smoothed share of a batch in evaluation less that in training.
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


@dataclass(kw_only=True)
class BudgetController:
    """Holds the executed share of a network on a goal that moves to a target, by a shift of the
    logits and a weight in the loss. docs/budget.md says how they work together.

    Its options are those of :class:`Budget` and :class:`BudgetHook`.

    Args:
        steps (int): Iterations of the training.
        target (float, optional): Share of the MACs to execute, within (0, 1].
            Defaults to None.
        save (float, optional): In place of ``target``, the share to save,
            within [0, 1). Defaults to None.
        begin (float): Part of the training after which the share starts to
            fall. Defaults to 0.0.
        reach (float): Part of the training after which it is at the target.
            Defaults to 0.6.
        floor (float): Least share of open channels of each gate, over the
            images, so that no layer dies. Defaults to 0.0.
        cap (float, optional): Share no single image should exceed, at least the
            target. Defaults to None.
        max_weight (float): Bound of the loss's weight, if the task's own loss does not need more
            (:meth:`TaskPull.balance`). Defaults to 4.0.
        check_interval (int, optional): Steps between two passes in
            evaluation. Defaults to None: 20, less if there are under 500.
        pull (float): How much channels that the task pulls at are spared on the way
            down, an exponent; 0 moves all alike. The more, the more channels end open or
            closed for all images. Defaults to 0.5.

    Raises:
        UsageError: Names the option that is out of range, its value and what would be right.
    """

    steps: int
    target: Optional[float] = None
    save: Optional[float] = None
    begin: float = 0.0
    reach: float = 0.6
    floor: float = 0.0
    cap: Optional[float] = None
    max_weight: float = 4.0
    check_interval: Optional[int] = None
    pull: float = 0.5
    max_shift: ClassVar[float] = 0.2
    """Bound of a step of the logits."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f'steps={self.steps!r} must be the number of steps of the training')
        self.wanted = self._checked_share()
        self.state = BudgetState()
        # In the end as slow as a time constant of a quarter of what is left allows.
        settling = max(1.0, (1 - self.reach) * self.steps)
        self.slowest = min(_FASTEST, max(_FASTEST / 20, 4 / settling))

    def _checked_share(self) -> float:
        """The share to execute, from either way to say it; refuses what is out of range."""
        target, save = self.target, self.save
        if (target is None) == (save is None):
            raise UsageError(
                f'target={target!r} and save={save!r}: give one of them, the share of the MACs to '
                'execute or to save'
            )
        if target is not None and not 0 < target <= 1:
            raise UsageError(
                f'target={target!r} must be within (0, 1], the share of the MACs to execute; 0.5 '
                'is half of them'
            )
        if save is not None and not 0 <= save < 1:
            raise UsageError(
                f'save={save!r} must be within [0, 1), the share of the MACs to save; 0.5 is half '
                'of them'
            )
        share = float(target if target is not None else 1.0 - save)  # type: ignore[operator]
        if not 0 <= self.begin < self.reach <= 1:
            raise UsageError(
                f'begin={self.begin!r} and reach={self.reach!r} must be parts of the training with '
                '0 <= begin < reach <= 1'
            )
        if self.cap is not None and not share <= self.cap <= 1:
            raise UsageError(
                f'cap={self.cap!r} must be within [{share:g}, 1]: no image above the cap, and all '
                'of them at the target on average'
            )
        for name, fits, right in (
            ('floor', 0 <= self.floor < 1, 'within [0, 1)'),
            ('max_weight', self.max_weight > 0, 'positive'),
            ('pull', 0 <= self.pull <= 1, 'within [0, 1]'),
            ('check_interval', self.check_interval is None or self.check_interval >= 1,
             '1 or more'),
        ):  # fmt: skip
            if not fits:
                raise UsageError(f'{name}={getattr(self, name)!r} must be {right}')
        return share

    def checks_at(self, step: int) -> bool:
        """Whether the batch of a step is looked at in evaluation as well."""
        return (step + 1) % (self.check_interval or min(20, max(1, self.steps // 25))) == 0

    def progress(self, step: int) -> float:
        """How much of the way to the target lies behind, 0 to 1."""
        return _ramp(step / self.steps, self.begin, self.reach)

    def goal(self, step: int) -> Optional[float]:
        """The share the network should be at, None before the first reading."""
        start = self.state.start
        if start is None:
            return None
        return start + self.progress(step) * (self.wanted - start)

    def falls(self) -> bool:
        """Whether channels are to be closed, and not opened, on the way to the target."""
        return self.state.start is not None and self.state.start > self.wanted

    def gain(self, step: int) -> float:
        """Part of the distance to the goal that one step goes. It falls from the target to the
        end, so that the noise of single batches averages out."""
        done = _ramp(step / self.steps, self.reach, 1.0)
        return _FASTEST ** (1 - done) * self.slowest**done

    def update(
        self, reading: Reading, step: int, speeds: Optional[Sequence[Tensor]] = None
    ) -> list[Any]:
        """Take in a reading, the same on all ranks.

        Returns:
            list[float | Tensor]: What to add to the logits of each gate; with speeds (how far a
            shift by 1 moves its channels), to that of each channel.
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
        return 1 + _SHARPEST * min(1.0, max(0.0, 2 * (self.state.doubt - _DOUBT)))

    def trust(self, step: int) -> float:
        """Weight of the hard share against the expected one: hard decisions of gates that all
        started alike would fall off a cliff."""
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
