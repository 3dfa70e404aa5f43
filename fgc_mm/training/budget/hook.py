# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A budget for a Runner."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Optional

from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from ...errors import UsageError, in_context
from ...gates import Gate
from ...runtime import unwrap
from ...runtime.config.argument_types import check_arguments
from ..gate_loss_hook import GateLossHook
from ..l0_hook import L0Hook
from .budget import Budget
from .controller import BudgetController

_KEY = 'budget'
_MISSED = 0.02
"""Distance from the target at the end of a training that is worth a warning."""


@HOOKS.register_module()
class BudgetHook(GateLossHook):
    """Trains the gates to execute a given share of the backbone's MACs, by a :class:`Budget`.

    The share is that of ``tools/test.py``. What validations count is taken over as well, once
    the target is reached, if there is a :class:`GatedMACsHook`.

    It takes the place of :class:`L0Hook`, goes with the other hooks on gates, and logs
    ``budget/goal``, ``budget/share`` (smoothed, as in evaluation),
    ``budget/expected``, ``budget/weight`` and, with a cap, ``budget/over_cap``.

    Args:
        target (float, optional): Share of the MACs to execute, within (0, 1].
            Defaults to None, for ``save=`` in its place.
        backbone (str): Name of the model's part that the share is about, '' for all of it.
            Defaults to 'backbone'.
        log_interval (int): Iterations between two logs of every gate's
            openness. Defaults to 50.
        **options: ``save``, ``begin``, ``reach``, ... of :class:`BudgetController`.

    Example:
        >>> custom_hooks = [dict(type='BudgetHook', target=0.5)]
    """

    loss_name = 'loss_budget'
    options_of: ClassVar[dict] = {BudgetController: ()}

    def __init__(
        self,
        target: Optional[float] = None,
        backbone: str = 'backbone',
        log_interval: int = 50,
        **options: Any,
    ) -> None:
        super().__init__(log_interval)
        self.options = dict(options, target=target)
        check_arguments(type(self), self.options)
        # A mistake in these shows now, and not after the data is loaded.
        with in_context('BudgetHook'):
            plan = BudgetController(steps=1, **self.options)
        self.target, self.begin, self.reach = plan.wanted, plan.begin, plan.reach
        self.backbone = backbone
        self.budget: Optional[Budget] = None
        self._validated: Optional[tuple[int, float]] = None
        self._loaded: Optional[dict] = None

    def before_train(self, runner: Runner) -> None:
        """Set the budget up, and take over the state of a resumed run."""
        for hook in runner.hooks:
            if isinstance(hook, L0Hook):
                raise UsageError(
                    'BudgetHook: custom_hooks have an L0Hook as well, whose fixed rho would work '
                    f'against target={self.target:g}; keep one of them'
                )
            if isinstance(hook, BudgetHook) and hook is not self:
                raise UsageError('BudgetHook: custom_hooks have two of them; keep one')
        super().before_train(runner)
        with in_context('BudgetHook'):
            self.budget = Budget(
                unwrap(runner.model), steps=runner.max_iters, backbone=self.backbone, **self.options
            )
        loaded, self._loaded = self._loaded, None
        if runner.iter and loaded is not None:
            self.budget.load_state_dict(loaded)
        elif runner.iter:
            runner.logger.warning(
                'BudgetHook: the checkpoint to be resumed was saved without BudgetHook; the '
                'controller starts anew'
            )

    def reached_at(self, runner: Runner) -> float:
        """The iteration at which the share stands at the target, by plan."""
        return self.reach * runner.max_iters

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        assert self.budget is not None
        self.budget.iteration = runner.iter

    def loss(self, gates: dict[str, Gate], data_samples: Any, runner: Runner) -> Tensor:
        assert self.budget is not None
        with in_context('BudgetHook'):
            return self.budget.loss()

    def after_step(self, runner: Runner) -> None:
        """Move the gates, and log."""
        budget = self.budget
        assert budget is not None
        if not budget.step():
            return
        state = budget.controller.state
        figures = dict(
            goal=budget.goal, share=state.share, expected=state.expected, weight=budget.weight
        )
        if budget.controller.cap is not None:
            figures['over_cap'] = budget.over_cap
        for name, value in figures.items():
            runner.message_hub.update_scalar(f'train/budget/{name}', value)

    def discard(self) -> None:
        super().discard()
        if self.budget is not None:
            self.budget.discard()

    def after_train(self, runner: Runner) -> None:
        """Say where the training has ended, loudly if it is not the target."""
        super().after_train(runner)
        if self.budget is None:
            return
        self.budget.close()
        if not self.budget.controller.state.seen:
            return
        share, where = self.budget.share, 'over the last batches'
        if self._validated is not None and self._validated[0] == runner.iter:
            share, where = self._validated[1], 'in the last validation'
        of = f'the {self.backbone or "model"}'
        text = (
            f"BudgetHook: the network executes {share:.3f} of {of}'s MACs {where}, target "
            f'{self.target:g}'
        )
        missed = abs(share - self.target) > _MISSED
        if missed:
            text += (
                '. Train longer, or let it reach the target earlier (reach='
                f'{self.reach:g}); averaged weights (EMAHook) follow late. The network can '
                f'be turned there as it is: tools/test.py --budget {self.target:g}'
            )
        runner.logger.log(logging.WARNING if missed else logging.INFO, text)

    def after_val_epoch(self, runner: Runner, metrics: Optional[dict[str, float]] = None) -> None:
        """Take over what the validation counted, if it did."""
        saved = (metrics or {}).get('macs/pruning_ratio')
        if saved is not None and self.budget is not None and self._is_counted(runner):
            self._validated = runner.iter, 1 - saved / 100
            self.budget.controller.validated(self._validated[1], runner.iter)

    def _is_counted(self, runner: Runner) -> bool:
        """Whether a validation's share is that of the same part of the model."""
        from ...evaluation import GatedMACsHook

        hooks = [hook for hook in runner.hooks if isinstance(hook, GatedMACsHook)]
        return all(hook.backbone == self.backbone for hook in hooks)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if self.budget is not None:
            checkpoint[_KEY] = self.budget.state_dict()

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Also called for load_from and testing: whether it is of use shows later.
        self._loaded = checkpoint.get(_KEY)
