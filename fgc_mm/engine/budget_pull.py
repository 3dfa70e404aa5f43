# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which channels a budget closes first."""

from __future__ import annotations

from functools import partial
from typing import Any, Optional

import torch
from mmengine.dist import all_reduce
from torch import Tensor

from ..complexity import BackboneShare

_RATE = 0.05
"""Weight of a batch in the means over batches."""


class TaskPull:
    """How hard the task pulls at each channel, from the gradients on its logits.

    Channels that are shifted alike come to the threshold together, and which of them
    close is left to chance. A sparsity loss does better with an optimizer of unit steps,
    such as Adam: that moves a logit by what the loss gains there, over how strong all
    gradients on it are, so what the task does not need goes first. :meth:`speeds` gives a
    shift that preference, by the root of the same ratio, whatever the optimizer and its rate.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._means: Optional[Tensor] = None
        self._sizes: list[int] = []
        self._gains: Optional[Tensor] = None
        self._grads: dict[int, Tensor] = {}
        self._own: dict[int, Tensor] = {}

    def watch(self, share: BackboneShare, logits: list[Tensor]) -> list[Tensor]:
        """Wait for the gradients of a batch.

        Args:
            share (BackboneShare): Of the pass the logits are from.
            logits (list[Tensor]): B x C of each gate, as the task has them.

        Returns:
            list[Tensor]: The same, for a loss whose gradients are not the task's.
        """
        self.discard()
        self._sizes = [a.size(1) for a in logits]
        self._gains = torch.cat(_gains(share, [a.detach().float() for a in logits]))
        own = [a.view_as(a) for a in logits]
        for number, (theirs, ours) in enumerate(zip(logits, own, strict=True)):
            if theirs.requires_grad:
                theirs.register_hook(partial(self._grads.__setitem__, number))
                ours.register_hook(partial(self._own.__setitem__, number))
        return own

    def discard(self) -> None:
        """Forget the last batch."""
        self._gains, self._grads, self._own = None, {}, {}

    @torch.no_grad()
    def take(self) -> None:
        """Take the last batch in, that of all ranks."""
        if self._gains is None:
            return
        squares = self._gains.new_zeros(len(self._gains))
        for part, number in zip(squares.split(self._sizes), range(len(self._sizes)), strict=True):
            if number in self._grads:
                grads = self._grads[number].float()
                if number in self._own:
                    grads = grads - self._own[number].float()
                part.copy_(grads.square().mean(dim=0))
        found = torch.stack([squares, self._gains])
        self.discard()
        all_reduce(found, 'mean')
        if not bool(found.isfinite().all()):
            return  # a loss scale that was too high
        if self._means is None or self._means.shape != found.shape:
            self.seen, self._means = 0, torch.zeros_like(found)
        self.seen += 1
        self._means += max(_RATE, 1 / self.seen) * (found - self._means)

    def speeds(self) -> Optional[list[Tensor]]:
        """How far a shift by 1 moves the channels of each gate, the same on all ranks: 0 to 2,
        and 1 in the middle; None before the first batch."""
        if self._means is None or self._means.size(1) != sum(self._sizes):
            return None
        squares, gains = self._means
        ratios = gains / squares.sqrt().clamp(min=1e-12)
        # The ratio itself would set channels so far apart that images cannot flip them.
        roots = ratios.sqrt()
        middle = roots.median().clamp(min=1e-12)
        return list((2 * roots / (roots + middle)).split(self._sizes))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and a tensor."""
        return dict(seen=self.seen, means=None if self._means is None else self._means.cpu())

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on where another one was."""
        means = state['means']
        self.seen, self._means = state['seen'], None if means is None else means.to(device)


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
