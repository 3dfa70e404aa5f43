# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One network, many budgets: the gate threshold as a dial at evaluation time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any, Optional

import torch
import torch.nn as nn
from mmengine.dist import all_reduce
from mmengine.runner import Runner

from ..errors import UsageError
from ..gates import set_threshold
from .gated_macs_hook import PredictionCounter, read_macs

_FAR = 15.0  # logits; beyond, single precision cannot tell a probability from 0 or 1
_HALVINGS = 16


class ThresholdDial:
    """Finds the gate threshold at which a network executes a given share.

    It runs the network on a calibration set for each threshold it tries: what
    one gate decides changes what later ones see, so the decisions of one pass
    do not tell those of another. The threshold is halved in on the scale of
    logits, and what was measured once is not measured again.

    Args:
        model (nn.Module): A task model with gates, in evaluation mode; it may be
            wrapped for distributed or test-time augmented execution.
        batches (Iterable): Batches of the calibration set, as a dataloader
            gives them; they are kept in memory.
        backbone (str): Name of the part that is the backbone.
            Defaults to 'backbone'.

    Example:
        >>> dial = ThresholdDial(model, loader)
        >>> set_threshold(model, dial.find(0.4))
    """

    def __init__(self, model: nn.Module, batches: Iterable, backbone: str = 'backbone') -> None:
        self.batches = list(batches)
        if not self.batches:
            raise UsageError('the calibration set is empty')
        self._counter = PredictionCounter(model, backbone)
        # Not the model of test-time augmentation: budgets are about one pass.
        self.model = self._counter.model
        self._known: dict[float, float] = {}

    @torch.no_grad()
    def share(self, threshold: float) -> float:
        """Executed share of the backbone's MACs over the calibration set."""
        if threshold not in self._known:
            set_threshold(self.model, threshold)
            totals = torch.zeros(2, dtype=torch.float64)
            self._counter.attach()
            try:
                for batch in self.batches:
                    for sample in self.model.test_step(batch):  # type: ignore[operator]
                        macs = read_macs(sample)
                        totals += totals.new_tensor([macs.backbone_executed, macs.backbone_dense])
            finally:
                self._counter.detach()
            all_reduce(totals)
            self._known[threshold] = float(totals[0] / totals[1])
        return self._known[threshold]

    def find(self, budget: float, tolerance: float = 0.002) -> float:
        """The threshold for a budget: of those tried, the one whose share is nearest.

        Raises:
            UsageError: If the budget is not within what thresholds can do.
        """
        low, high = -_FAR, _FAR
        tried: dict[float, float] = {}
        middle = 0.0  # the threshold it was trained for
        for _ in range(_HALVINGS):
            tried[middle] = found = self.share(_sigmoid(middle))
            if abs(found - budget) <= tolerance:
                break
            if len(tried) == 1:
                self._check_reach(budget, found)
            low, high = (middle, high) if found > budget else (low, middle)
            middle = (low + high) / 2
        return _sigmoid(min(tried, key=lambda x: abs(tried[x] - budget)))

    def _check_reach(self, budget: float, found: float) -> None:
        """Look at the end of the dial that lies on the budget's side of what was found."""
        end = self.share(_sigmoid(_FAR if found > budget else -_FAR))
        if (end - budget) * (found - budget) > 0:
            least, most = self.share(_sigmoid(_FAR)), self.share(_sigmoid(-_FAR))
            raise UsageError(
                f'budget={budget:g} is out of reach: over all thresholds this network executes '
                f"{least:.3f} to {most:.3f} of the backbone's MACs on the calibration set"
            )


def calibration_batches(runner: Runner, split: str, images: Optional[int] = None) -> list[Any]:
    """The first batches of a split, with as many images at least, or all of it by default."""
    cfg = runner.cfg.get(f'{split}_dataloader')
    if cfg is None:
        raise UsageError(f'the config has no {split}_dataloader to calibrate on')
    loader = runner.build_dataloader(cfg)
    # A sampler for training by iterations never ends.
    images = len(loader.dataset) if images is None else images
    size = loader.batch_size or loader.batch_sampler.batch_size
    return list(islice(loader, math.ceil(images / size)))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
