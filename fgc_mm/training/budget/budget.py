# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Say the budget, get the budget: in any training loop."""

from __future__ import annotations

from typing import Any, ClassVar, Optional

import torch
import torch.nn as nn
from mmengine.dist import all_reduce
from torch import Tensor

from ...errors import UsageError
from ...gates import forget_records, records_of
from ...macs import BackboneShare, MACsTracer
from ...runtime import Attachments, in_evaluation
from ...runtime.config.argument_types import check_arguments
from .controller import BudgetController
from .reading import BatchReader, Reading
from .task_pull import TaskPull

_PULL, _ITERATION = 'pull', 'iteration'
_HEADROOM = 1.5
"""How many times the weight may be what holds the balance with the task."""
_SLOPE = 0.1
"""What a logit of an image above the cap is pressed with at least; the slope of a sigmoid
is 0.25 at most."""


class Budget:
    """Trains the gates of a network to execute a given share of its MACs.

    The share is that of :func:`~fgc_mm.count_macs` in evaluation: hard decisions, at the size
    of the images, the gates' own MACs included, what no gate switches counted fully. docs/budget.md
    says how it gets there; :class:`TaskPull` what closes first.

    Every ``check_interval`` steps the network runs on the batch once more in evaluation, and
    the difference to what was counted in training is corrected: gates and norms decide
    differently there.

    A step under ``torch.no_grad`` or in evaluation leaves everything as it is. Several
    processes act on one measurement, that of all of them.

    Args:
        network (nn.Module): A network with gates, in the loop's own hands.
        target (float, optional): Share of the MACs to execute, within (0, 1].
            Defaults to None, for ``save=`` in its place.
        steps (int): How often :meth:`step` will be called in the whole training.
        backbone (str): Name of the part of the network that the share is about.
            Defaults to '', all of it.
        **options: ``save``, ``begin``, ``reach``, ``floor``, ``cap``, ``max_weight``,
            ``check_interval`` and ``pull`` of :class:`BudgetController`.

    Example:
        >>> budget = Budget(network, target=0.5, steps=epochs * len(loader))
        >>> loss = criterion(network(images), labels) + budget.loss()
        >>> loss.backward()
        >>> optimizer.step()
        >>> budget.step()
    """

    options_of: ClassVar[dict] = {BudgetController: ()}

    def __init__(
        self,
        network: nn.Module,
        target: Optional[float] = None,
        *,
        steps: int,
        backbone: str = '',
        **options: Any,
    ) -> None:
        check_arguments(type(self), options)
        self.controller = BudgetController(target=target, steps=steps, **options)
        self.prices = BackboneShare(network, backbone)
        self.gates = self.prices.gates
        if not self.gates:
            raise UsageError(
                f'backbone={backbone!r} of {type(network).__name__} has no gates: its cost cannot '
                "be controlled; name the part that has them, such as 'backbone'"
            )
        for name, gate in self.gates.items():
            if not gate.shiftable():
                raise UsageError(
                    f'the cost of {type(gate).__name__} {name} is not learned, so it cannot be '
                    "controlled; use gate=dict(type='BinConcreteGate')"
                )
        self._fixed = [
            not any(p.requires_grad for p in gate.parameters()) for gate in self.gates.values()
        ]
        if all(self._fixed):
            raise UsageError(
                'all gates are frozen, so their cost cannot be controlled; train them '
                '(gates_follow_freeze=False in the backbone)'
            )
        self.pull = TaskPull(self.controller.pull)
        self.iteration = 0
        self.goal = 1.0
        self.over_cap = 0.0
        self._tracer = MACsTracer(network, backbone)
        self._attached = Attachments()
        self._attached.before(self.prices.backbone, self._begin_pass, with_kwargs=True)
        self.prices.attach()
        self._inputs: Optional[tuple[tuple, dict]] = None
        self._report: Optional[Tensor] = None
        self._speeds: Optional[list[Tensor]] = None
        self._ran: set[str] = set()
        self._checked = False
        forget_records(self.gates)

    @property
    def share(self) -> float:
        """The share that evaluation would count now, smoothed."""
        return self.controller.state.share

    @property
    def weight(self) -> float:
        """Weight of the expected share in the loss. Where the task holds its channels with more
        than ``max_weight``, all weights are larger in proportion."""
        controller = self.controller
        return controller.state.weight * max(
            1.0, _HEADROOM * self.pull.balance() / controller.max_weight
        )

    def loss(self) -> Tensor:
        """The expected share of the last pass times a weight that the controller finds.

        Returns:
            Tensor: A scalar, to be added to the task's loss.

        Raises:
            UsageError: If the target is below what is left with all gates closed.
        """
        records = records_of(self.gates)
        like = next(iter(records.values())).logits
        idle = self.prices.images
        with torch.autocast(like.device.type, enabled=False):
            # A gate behind the last output did not run, and costs nothing.
            calls = [
                [record.logits for record in gate.pass_records]
                if name in records
                else [like.new_zeros(idle, gate.channels)]
                for name, gate in self.gates.items()
            ]
            if self._trains():
                self._ran = set(records)
                return self._loss(self.pull.watch(self.prices, calls, self._fixed))
            return self._loss([torch.cat(logits) for logits in calls])

    def step(self) -> bool:
        """Move the gates. Call it after each step of the optimizer.

        Returns:
            bool: Whether there was a batch to learn from.
        """
        if self._report is None:
            return False
        reading, self._report = Reading.of_ranks(self._report, len(self.gates)), None
        controller, iteration = self.controller, self.iteration
        if self._inputs is not None:
            controller.correct(self._evaluate(*self._inputs) - reading.hard)
            self._inputs = None
        goal = controller.goal(iteration)
        self.goal, self.over_cap = reading.expected if goal is None else goal, reading.over_cap
        moves = controller.update(reading, iteration, self._speeds)
        moves = reading.harmless(moves, [gate.channels for gate in self.gates.values()])
        for (name, gate), move, fixed in zip(self.gates.items(), moves, self._fixed, strict=True):
            if not fixed and name in self._ran:
                gate.shift(move)
                gate.sharpen(controller.sharpening())
        self.pull.take()
        self.iteration += 1
        return True

    def discard(self) -> None:
        """Forget the last batch, because its step is not taken."""
        self.pull.discard()
        self._inputs = self._report = None

    def close(self) -> None:
        """Take all hooks off the network."""
        self.discard()
        self._attached.remove()
        self.prices.detach()

    def state_dict(self) -> dict[str, Any]:
        """Numbers, lists and one tensor."""
        return {
            **self.controller.state_dict(),
            _PULL: self.pull.state_dict(),
            _ITERATION: self.iteration,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one was."""
        state = dict(state)
        pull = state.pop(_PULL, None)  # earlier versions saved neither
        self.iteration = state.pop(_ITERATION, self.iteration)
        self.controller.load_state_dict(state)
        if pull is not None:
            self.pull.load_state_dict(pull, next(self.prices.backbone.parameters()).device)

    def _trains(self) -> bool:
        return self.prices.backbone.training and torch.is_grad_enabled()

    def _begin_pass(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        forget_records(self.gates)
        if self._trains():
            self._inputs = (args, kwargs) if self.controller.checks_at(self.iteration) else None

    def _loss(self, logits: list[Tensor]) -> Tensor:
        prices, controller = self.prices, self.controller
        state = controller.state
        # What the task holds least is the first to close, but not to open.
        speeds = self.pull.speeds() if controller.falls() else None
        plain = [a.detach() for a in logits]
        batch = BatchReader(prices, plain, self._fixed, controller.floor, speeds)
        if self._trains():
            if not self._checked:
                self._check_target(batch.openness)
                self._checked = True
            goal = controller.goal(self.iteration)
            goal = float(batch.expected.mean()) if goal is None else goal
            shift = batch.solve(goal, controller.trust(self.iteration), state.correction)
            self._report = batch.report(shift, controller.cap, state.correction)
            self._speeds = speeds

        probs = [a.sigmoid().mean(dim=1) for a in logits]
        # A gate at its floor is not pressed any further.
        held = controller.at_floor() or [False] * len(logits)
        pressed = [p.detach() if stays else p for p, stays in zip(probs, held, strict=True)]
        loss = self.weight * prices.of(pressed)
        if controller.cap is not None:
            # Hard decisions say who is above the cap. Probabilities lead down, and logits
            # where those are so sure that they have no slope.
            steeper = [
                p if stays else p + _SLOPE * (a - a.detach()).mean(dim=1)
                for p, a, stays in zip(pressed, logits, held, strict=True)
            ]
            above = batch.hard + state.correction > controller.cap
            loss = loss + state.cap_weight * above * prices.of(steeper)
        return self.pull.beside(loss.mean()) if self._trains() else loss.mean()

    def _check_target(self, opened: Tensor) -> None:
        """Refuse a target below what is left with all closed but frozen gates, which stay."""
        target, floor = self.controller.wanted, self.controller.floor
        fixed = torch.tensor(self._fixed, device=opened.device)
        least = self.prices.of(torch.where(fixed, opened, floor)[None])
        # Images of the ranks may differ in size: all of them refuse, or none.
        worst = least.max()
        all_reduce(worst, 'max')
        if target < float(worst):
            what = ', frozen gates as they are,' if any(self._fixed) else ''
            what += f', each gate open at its floor of {floor:g},' if floor else ''
            raise UsageError(
                f'target={target:g} cannot be reached: stem, shortcuts and the gates '
                f"themselves{what} cost {worst:.3f} of the backbone's MACs at this image size; "
                f'choose a target above {worst:.3f}'
            )

    @torch.no_grad()
    def _evaluate(self, args: tuple, kwargs: dict) -> float:
        """The share of a batch as evaluation counts it, over all ranks."""
        part, tracer = self.prices.backbone, self._tracer
        records = {gate: gate.record for gate in self.gates.values()}
        tracer.reset()
        tracer.attach()
        if kwargs.get('mode') == 'loss':  # a whole model, which would draw regions for training
            kwargs = {**kwargs, 'mode': 'tensor'}
        try:
            with in_evaluation(part):
                part(*args, **kwargs)
        finally:
            tracer.detach()
            for gate, record in records.items():
                gate.record = record
        batch = args[0] if args else next(iter(kwargs.values()))
        images = tracer.take(len(batch))
        sums = torch.tensor(
            [sum(i.backbone_executed for i in images), sum(i.backbone_dense for i in images)],
            dtype=torch.float64,
            device=batch.device,
        )
        all_reduce(sums)
        return float(sums[0] / sums[1])
