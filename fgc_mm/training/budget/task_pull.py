# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which channels a budget closes first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Optional

import torch
from mmengine.dist import all_reduce
from torch import Tensor

from ...macs import BackboneShare

_RATE = 0.05
"""Weight of a batch in the means over batches."""


class TaskPull:
    """How hard the task pulls at each channel, from the gradients on its logits.

    Channels that are shifted alike come to the threshold together, and which of them
    close is left to chance. A sparsity loss does better with an optimizer of unit steps,
    such as Adam: that moves a logit by what the loss gains there, over how strong all
    gradients on it are, so what the task does not need goes first. :meth:`speeds` gives a
    shift that preference, by a power of the same ratio, whatever the optimizer and its rate.

    :meth:`balance` says how hard the task holds on to all of them together.

    Args:
        exponent (float): The power; 0 moves all channels alike. Defaults to 0.5.
    """

    def __init__(self, exponent: float = 0.5) -> None:
        self.exponent = exponent
        # For every channel: squares of gradients, gains, and how many batches had any.
        self._means: Optional[Tensor] = None
        self._sizes: list[int] = []
        self._images = 0
        self._gains: Optional[Tensor] = None
        self._backward: Optional[Tensor] = None
        self._balance, self._batches = 0.0, 0
        # Of each gate and call, in all and by the loss that :meth:`watch` is asked for.
        self._grads: dict[tuple[int, int], Tensor] = {}
        self._own: dict[tuple[int, int], Tensor] = {}

    def watch(
        self,
        share: BackboneShare,
        logits: Sequence[Sequence[Tensor]],
        fixed: Sequence[bool],
    ) -> list[Tensor]:
        """Wait for the gradients of a batch.

        Args:
            share (BackboneShare): Of the pass the logits are from.
            logits (Sequence): For each gate and each of its calls decisions x C.
            fixed (Sequence[bool]): Gates that a shift does not move.

        Returns:
            list[Tensor]: The same, the calls of a gate below each other, for a loss whose
            gradients are not the task's.
        """
        self.discard()
        joined = []
        for number, calls in enumerate(logits):
            own = [a.view_as(a) for a in calls]
            for call, (theirs, ours) in enumerate(zip(calls, own, strict=True)):
                if theirs.requires_grad and not fixed[number]:
                    theirs.register_hook(partial(self._grads.__setitem__, (number, call)))
                    ours.register_hook(partial(self._own.__setitem__, (number, call)))
            joined.append(own[0] if len(own) == 1 else torch.cat(own))
        self._sizes, self._images = [a.size(1) for a in joined], len(joined[0])
        self._gains = torch.cat(_gains(share, [a.detach().float() for a in joined]))
        return joined

    def beside(self, loss: Tensor) -> Tensor:
        """Learn from a loss beside the task's what both are multiplied with before the backward
        pass, by mixed precision or accumulation.

        Args:
            loss (Tensor): A scalar.

        Returns:
            Tensor: The same.
        """
        if loss.requires_grad:
            loss.register_hook(partial(setattr, self, '_backward'))
        return loss

    def balance(self) -> float:
        """The weight of the expected share in the loss at which, over all channels, it pushes down
        as much as the task pulls up; 0 if the task does not."""
        return max(0.0, self._balance)

    def discard(self) -> None:
        """Forget the last batch."""
        self._gains, self._grads, self._own, self._backward = None, {}, {}, None

    @torch.no_grad()
    def take(self) -> None:
        """Take the last batch in, that of all ranks."""
        if self._gains is None:
            return
        squares, pulls, reached = (torch.zeros_like(self._gains) for _ in range(3))
        parts = zip(*(x.split(self._sizes) for x in (squares, pulls, reached)), strict=True)
        for number, (part, pull, seen) in enumerate(parts):
            calls = [key for key in self._grads if key[0] == number]
            if calls:
                grads = torch.cat([self._of_task(key) for key in calls])
                part.copy_(grads.square().mean(dim=0))
                pull.copy_(-grads.sum(dim=0))
                seen.fill_(1)
        if self._backward is not None:
            pulls /= self._backward.clamp(min=1e-30)
        found = torch.stack([squares, self._gains, reached, pulls, torch.ones_like(reached)])
        found *= self._images
        self.discard()
        all_reduce(found)
        pulls, found = found[3] / found[4], found[:3] / found[4]
        known = found[2] > 0
        # Only how they compare counts, whatever the loss and its scale.
        mean = torch.where(known, found[0], 0.0).sum() / known.sum().clamp(min=1)
        found[0] /= mean.clamp(min=1e-30)
        # Nothing of a batch whose loss scale was too high.
        known &= torch.where(known, found, 0.0).isfinite().all()
        if bool(known.any()):
            balance = float(pulls[known].sum() / found[1, known].sum().clamp(min=1e-30))
            self._batches += 1
            self._balance += max(_RATE, 1 / self._batches) * (balance - self._balance)
        if self._means is None or self._means.shape != found.shape:
            self._means = torch.zeros_like(found)
        self._means[2] += known
        rates = (1 / self._means[2].clamp(min=1)).clamp(min=_RATE) * known
        self._means[:2] += torch.where(known, rates * (found[:2] - self._means[:2]), 0.0)

    def _of_task(self, call: tuple[int, int]) -> Tensor:
        """The task's part of the gradient on the logits of a call."""
        grads = self._grads[call].float()
        return grads - self._own[call].float() if call in self._own else grads

    def speeds(self) -> Optional[list[Tensor]]:
        """How far a shift by 1 moves the channels of each gate, the same on all ranks: 0 to 2,
        1 in the middle and where nothing is known; None before the first batch."""
        if self._means is None or self._means.size(1) != sum(self._sizes):
            return None
        squares, gains, batches = self._means
        # The ratio itself would set channels so far apart that images cannot flip them.
        roots = (gains / squares.sqrt().clamp(min=1e-12)) ** self.exponent
        known = batches > 0
        middle = roots[known].median().clamp(min=1e-12) if bool(known.any()) else 1.0
        speeds = torch.where(known, 2 * roots / (roots + middle), 1.0)
        return list(speeds.split(self._sizes))

    def state_dict(self) -> dict[str, Any]:
        """Numbers and a tensor, which is None before the first batch."""
        means = None if self._means is None else self._means.cpu().clone()
        return dict(means=means, balance=self._balance, batches=self._batches)

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on where another one was."""
        means = state['means']
        self._means = None if means is None else means.to(device, copy=True)
        # Earlier versions saved neither.
        self._balance, self._batches = state.get('balance', 0.0), state.get('batches', 0)


def _gains(share: BackboneShare, logits: list[Tensor]) -> list[Tensor]:
    """What the expected share falls by with each logit, C for each gate."""
    probs = [a.sigmoid() for a in logits]
    with torch.enable_grad():
        openness = torch.stack([p.mean() for p in probs]).unsqueeze(0).requires_grad_()
        (costs,) = torch.autograd.grad(share.of(openness).sum(), openness)
    return [
        cost / p.size(1) * (p * (1 - p)).mean(dim=0)
        for cost, p in zip(costs[0], probs, strict=True)
    ]
