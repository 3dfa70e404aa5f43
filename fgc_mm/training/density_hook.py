# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Closes the channels of gates with a given density little by little."""

from __future__ import annotations

import math
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from ..errors import UsageError
from ..gates import FBSGate, find_gates
from ..runtime import unwrap
from .schedules import Schedule


@HOOKS.register_module()
class DensityHook(Hook):
    """Lets the density of every :class:`~fgc_mm.gates.FBSGate` fall from 1 to its own.

    A trained network that loses half of its channels at the first step does not find
    back in a short training; "Dynamic Channel Pruning: Feature Boosting and
    Suppression" lowers the density step by step as well. Validation and testing
    have the gates' own density all the time.

    Args:
        epochs (float): After how many it is reached, linearly. Defaults to 1.

    Example:
        >>> custom_hooks = [dict(type='DensityHook', epochs=2)]
    """

    def __init__(self, epochs: float = 1) -> None:
        number = isinstance(epochs, (int, float)) and not isinstance(epochs, bool)
        if not number or not 0 <= epochs < math.inf:
            raise UsageError(
                f'DensityHook: epochs={epochs!r} must be a number of epochs, 0 or more'
            )
        # The share of the way that is left.
        self.left = Schedule(value=0.0, end=float(epochs), begin=1.0)
        self._left = 0.0
        self._gates: list[FBSGate] = []

    def before_train(self, runner: Runner) -> None:
        gates = find_gates(unwrap(runner.model)).values()
        self._gates = [gate for gate in gates if isinstance(gate, FBSGate)]
        if not self._gates:
            raise UsageError(
                'DensityHook: the model has no FBSGate; other gates learn how many channels they '
                'leave open (BudgetHook, L0Hook)'
            )

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self._left = self.left.now(runner)
        for gate in self._gates:
            gate.training_density = gate.density + self._left * (1 - gate.density)

    def after_train(self, runner: Runner) -> None:
        if self._left:
            runner.logger.warning(
                f'DensityHook: epochs={self.left.end:g} is too long for this training, whose last '
                f'step had {self._left:.0%} of the way left: the density that gates are tested '
                'with was never trained'
            )
        for gate in self._gates:
            gate.training_density = None
