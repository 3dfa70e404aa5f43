# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Say the budget, get the budget."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Optional

import torch
import torch.nn as nn
from mmengine.dist import all_reduce
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from ...errors import UsageError, in_context
from ...gates import Gate
from ...macs import BackboneShare, MACsTracer
from ...runtime import unwrap
from ..gate_loss_hook import GateLossHook
from ..l0_hook import L0Hook
from .controller import BudgetController
from .options import check_options, target_of
from .reading import BatchReader, join
from .task_pull import TaskPull

_KEY, _PULL = 'budget', 'pull'
_SLOPE = 0.1
"""What a logit of an image above the cap is pressed with at least; the slope of a sigmoid
is 0.25 at most."""
_MISSED = 0.02
"""Distance from the target at the end of a training that is worth a warning."""


@HOOKS.register_module()
class BudgetHook(GateLossHook):
    """Trains the gates to execute a given share of the backbone's MACs.

    The share is that of ``tools/test.py``: hard decisions in evaluation, at the
    size of the images, the gates' own MACs included, stem and shortcuts counted
    fully. See :class:`BudgetController` for how it gets there and :class:`TaskPull`
    for what closes first; ``loss_budget`` is the expected share times a weight that the
    controller finds.

    Every ``check_interval`` iterations (20) the backbone runs on the batch once more
    in evaluation, and the difference to what was counted in training is
    corrected: gates and norms decide differently there. So is what validations
    count, once the target is reached, if there is a :class:`GatedMACsHook`.

    It takes the place of :class:`L0Hook`, goes with the other hooks on gates, and logs
    ``budget/goal``, ``budget/share`` (smoothed, as in evaluation),
    ``budget/expected``, ``budget/weight`` and, with a cap, ``budget/over_cap``.

    Args:
        target (float, optional): Share of the backbone's MACs to execute,
            within (0, 1]. Defaults to None.
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
        max_weight (float): Bound of the loss's weight. Defaults to 4.0.
        check_interval (int, optional): Iterations between two passes in
            evaluation. Defaults to None: 20, less if there are under 500.
        pull (float): How much channels that the task pulls at are spared on the way
            down, an exponent; 0 moves all alike. The more, the more channels end open or
            closed for all images. Defaults to 0.5.
        backbone (str): Name of the model's part that the share is about.
            Defaults to 'backbone'.
        log_interval (int): Iterations between two logs of every gate's
            openness. Defaults to 50.

    Example:
        >>> custom_hooks = [dict(type='BudgetHook', target=0.5)]
    """

    loss_name = 'loss_budget'

    def __init__(
        self,
        target: Optional[float] = None,
        save: Optional[float] = None,
        begin: float = 0.0,
        reach: float = 0.6,
        floor: float = 0.0,
        cap: Optional[float] = None,
        max_weight: float = 4.0,
        check_interval: Optional[int] = None,
        pull: float = 0.5,
        backbone: str = 'backbone',
        log_interval: int = 50,
    ) -> None:
        super().__init__(log_interval)
        self.target = target_of(target, save)
        check_options(
            self.target, begin, reach, floor, cap, max_weight, check_interval, pull, backbone
        )
        self.begin = begin
        self.reach = reach
        self.floor = floor
        self.cap = cap
        self.max_weight = max_weight
        self.check_interval = check_interval
        self.backbone = backbone
        self.controller: Optional[BudgetController] = None
        self.pull = TaskPull(pull)
        self._share: Optional[BackboneShare] = None
        self._tracer: Optional[MACsTracer] = None
        self._interval = 1
        self._inputs: Optional[tuple] = None
        self._report: Optional[Tensor] = None
        self._speeds: Optional[list[Tensor]] = None
        self._fixed: list[bool] = []
        self._checked = False
        self._validated: Optional[tuple[int, float]] = None
        self._loaded: Optional[dict] = None

    def before_train(self, runner: Runner) -> None:
        """Watch the backbone, and take over the state of a resumed run."""
        for hook in runner.hooks:
            if isinstance(hook, L0Hook):
                raise UsageError(
                    'BudgetHook: custom_hooks have an L0Hook as well, whose fixed rho would work '
                    f'against target={self.target:g}; keep one of them'
                )
            if isinstance(hook, BudgetHook) and hook is not self:
                raise UsageError('BudgetHook: custom_hooks have two of them; keep one')
        super().before_train(runner)
        model = unwrap(runner.model)
        with in_context('BudgetHook'):
            self._share = BackboneShare(model, self.backbone)
        if not self._share.gates:
            raise UsageError(
                f'BudgetHook: backbone={self.backbone!r} of {type(model).__name__} has no gates: '
                "its cost cannot be controlled; name the part that has them, such as 'backbone'"
            )
        for name, gate in self._share.gates.items():
            if not gate.shiftable():
                raise UsageError(
                    f'BudgetHook: the cost of {type(gate).__name__} {name} is not learned, so it '
                    "cannot be controlled; use gate=dict(type='BinConcreteGate')"
                )
        self._tracer = MACsTracer(model, self.backbone)
        self._share.attach()
        self._attached.before(self._share.backbone, partial(self._keep_inputs, runner))
        self._fixed = [
            not any(p.requires_grad for p in gate.parameters())
            for gate in self._share.gates.values()
        ]
        if all(self._fixed):
            raise UsageError(
                'BudgetHook: all gates are frozen, so their cost cannot be controlled; train them '
                '(gates_follow_freeze=False in the backbone)'
            )
        self._interval = self.check_interval or min(20, max(1, runner.max_iters // 25))
        self.controller = BudgetController(
            self.target, runner.max_iters, self.begin, self.reach, self.floor, self.max_weight
        )
        self.pull, self._checked = TaskPull(self.pull.exponent), False
        loaded, self._loaded = self._loaded, None
        if runner.iter and loaded is not None:
            loaded = dict(loaded)
            pull = loaded.pop(_PULL, None)  # saved by earlier versions without
            self.controller.load_state_dict(loaded)
            if pull is not None:
                self.pull.load_state_dict(pull, next(model.parameters()).device)
        elif runner.iter:
            runner.logger.log(
                logging.WARNING,
                'BudgetHook: the checkpoint to be resumed was saved without BudgetHook; the '
                'controller starts anew',
            )

    def reached_at(self, runner: Runner) -> float:
        """The iteration at which the share stands at the target, by plan."""
        return self.reach * runner.max_iters

    def discard(self) -> None:
        super().discard()
        self.pull.discard()
        self._inputs = self._report = None

    def after_train(self, runner: Runner) -> None:
        """Say where the training has ended."""
        super().after_train(runner)
        self.pull.discard()
        if self._share is not None:
            self._share.detach()
        self._inputs = self._report = None
        if self.controller is not None and self.controller.state.seen:
            self._say_where(runner, self.controller.state.share)

    def _say_where(self, runner: Runner, share: float) -> None:
        """Say at which share a training has ended; loudly if it is not the target."""
        where = 'over the last batches'
        if self._validated is not None and self._validated[0] == runner.iter:
            share, where = self._validated[1], 'in the last validation'
        text = (
            f"BudgetHook: the network executes {share:.3f} of the backbone's MACs {where}, target "
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

    def loss(self, gates: dict[str, Gate], data_samples: Any, runner: Runner) -> Tensor:
        share, controller = self._share, self.controller
        assert share is not None and controller is not None
        state = controller.state
        records = [gate.record for gate in share.gates.values()]
        like = next(record for record in records if record is not None).logits
        # A gate behind the last output did not run, and costs nothing.
        logits = [
            like.new_zeros(len(like), gate.channels) if gate.record is None else gate.record.logits
            for gate in share.gates.values()
        ]
        floored = controller.at_floor() or [False] * len(logits)
        logits = self.pull.watch(share, logits, self._fixed)
        # What the task holds least is the first to close, but not to open.
        self._speeds = self.pull.speeds() if controller.falls() else None
        batch = BatchReader(
            share, [a.detach() for a in logits], self._fixed, self.floor, self._speeds
        )
        if not self._checked:
            self._check_target(share, batch.openness.mean(dim=0))
            self._checked = True
        goal = controller.goal(runner.iter)
        goal = float(batch.expected.mean()) if goal is None else goal
        shift = batch.solve(goal, controller.trust(runner.iter), state.correction)
        self._report = batch.report(shift, self.cap, state.correction)

        probs = torch.stack([a.sigmoid().mean(dim=1) for a in logits], dim=1)
        # A gate at its floor is not pressed any further.
        held = probs.new_tensor(floored, dtype=torch.bool)
        pressed = torch.where(held, probs.detach(), probs)
        loss = state.weight * share.of(pressed)
        if self.cap is not None:
            # Hard decisions say who is above the cap. Probabilities lead down, and logits
            # where those are so sure that they have no slope.
            slopes = torch.stack([(a - a.detach()).mean(dim=1) for a in logits], dim=1)
            slopes = slopes.masked_fill(held, 0)
            above = batch.hard + state.correction > self.cap
            loss = loss + state.cap_weight * above * share.of(pressed + _SLOPE * slopes)
        return loss.mean()

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Optional[dict] = None,
    ) -> None:
        """Move the gates, and log."""
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        if self._report is None:
            return
        share, controller = self._share, self.controller
        assert share is not None and controller is not None
        gates = list(share.gates.values())
        reading, self._report = join(self._report, len(gates)), None
        if self._inputs is not None:
            controller.correct(self._evaluate(self._inputs) - reading.hard)
            self._inputs = None
        goal = controller.goal(runner.iter)
        moves = controller.update(reading, runner.iter, self._speeds)
        moves = reading.harmless(moves, [gate.channels for gate in gates])
        for gate, move, fixed in zip(gates, moves, self._fixed, strict=True):
            if not fixed and gate.record is not None:
                gate.shift(move)
                gate.sharpen(controller.sharpening())
        self.pull.take()
        state = controller.state
        figures = {
            'goal': reading.expected if goal is None else goal,
            'share': state.share,
            'expected': state.expected,
            'weight': state.weight,
        }
        if self.cap is not None:
            figures['over_cap'] = reading.over_cap
        for name, value in figures.items():
            runner.message_hub.update_scalar(f'train/budget/{name}', value)

    def after_val_epoch(self, runner: Runner, metrics: Optional[dict[str, float]] = None) -> None:
        """Take over what the validation counted, if it did."""
        saved = (metrics or {}).get('macs/pruning_ratio')
        if saved is not None and self.controller is not None and self._is_counted(runner):
            self._validated = runner.iter, 1 - saved / 100
            self.controller.validated(self._validated[1], runner.iter)

    def _is_counted(self, runner: Runner) -> bool:
        """Whether a validation's share is that of the same part of the model."""
        from ...evaluation import GatedMACsHook

        hooks = [hook for hook in runner.hooks if isinstance(hook, GatedMACsHook)]
        return all(hook.backbone == self.backbone for hook in hooks)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if self.controller is not None:
            checkpoint[_KEY] = {**self.controller.state_dict(), _PULL: self.pull.state_dict()}

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Also called for load_from and testing: whether it is of use shows later.
        self._loaded = checkpoint.get(_KEY)

    def _check_target(self, share: BackboneShare, opened: Tensor) -> None:
        """Refuse a target below what is left with all that can be closed closed.

        Args:
            share (BackboneShare): Prices it.
            opened (Tensor): Openness of each gate now, where frozen ones stay.
        """
        fixed = torch.tensor(self._fixed, device=opened.device)
        least = share.of(torch.where(fixed, opened, self.floor)[None])
        # Images of the ranks may differ in size: all of them refuse, or none.
        worst = least.max()
        all_reduce(worst, 'max')
        if self.target < float(worst):
            what = ', frozen gates as they are,' if any(self._fixed) else ''
            what += f', each gate open at its floor of {self.floor:g},' if self.floor else ''
            raise UsageError(
                f'BudgetHook: target={self.target:g} cannot be reached: stem, shortcuts and the '
                f"gates themselves{what} cost {worst:.3f} of the backbone's MACs at this image "
                f'size; choose a target above {worst:.3f}'
            )

    def _keep_inputs(self, runner: Runner, backbone: nn.Module, args: tuple) -> None:
        due = self.every_n_train_iters(runner, self._interval)
        self._inputs = args if due and backbone.training else None

    @torch.no_grad()
    def _evaluate(self, inputs: tuple) -> float:
        """The share of the batch as ``tools/test.py`` counts it, over all ranks."""
        share, tracer = self._share, self._tracer
        assert share is not None and tracer is not None
        modes = {module: module.training for module in share.backbone.modules()}
        records = {gate: gate.record for gate in share.gates.values()}
        share.backbone.eval()
        tracer.reset()
        tracer.attach()
        try:
            share.backbone(*inputs)
        finally:
            tracer.detach()
            for module, mode in modes.items():
                module.training = mode
            for gate, record in records.items():
                gate.record = record
        images = tracer.take(len(inputs[0]))
        sums = torch.tensor(
            [sum(i.backbone_executed for i in images), sum(i.backbone_dense for i in images)],
            dtype=torch.float64,
            device=inputs[0].device,
        )
        all_reduce(sums)
        return float(sums[0] / sums[1])
