# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Static pruning before a training."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import UsageError, in_context
from ..pruning import CRITERIA, prune
from ..runtime import one_batch, unwrap


@HOOKS.register_module()
class StaticPruningHook(Hook):
    """Closes channels of every :class:`~fgc_mm.gates.StaticGate` before the first step, see
    :func:`~fgc_mm.pruning.prune`. The training that follows is for the network to recover.

    A resumed run goes on with the channels that its checkpoint names.

    Args:
        criterion (str): ``'l2'``, ``'taylor'``, ``'features'`` (needs no labels) or ``'random'``.
            Defaults to 'taylor'.
        target (float): Share of the MACs to execute. Defaults to 0.5.
        batches (int): Batches of the training data that ``'taylor'`` and ``'features'`` look at.
            Defaults to 8.
        floor (float): Least share of open channels of each gate. Defaults to 0.1.
        backbone (str): Name of the model's part that the share is about.
            Defaults to 'backbone'.
        seed (int): Seed of ``'random'`` and ``'features'``. Defaults to 0.

    Example:
        >>> custom_hooks = [dict(type='StaticPruningHook', criterion='l2', target=0.5)]
    """

    def __init__(
        self,
        criterion: str = 'taylor',
        target: float = 0.5,
        batches: int = 8,
        floor: float = 0.1,
        backbone: str = 'backbone',
        seed: int = 0,
    ) -> None:
        if criterion not in CRITERIA:
            raise UsageError(f'StaticPruningHook: criterion={criterion!r} must be in {CRITERIA}')
        if batches < 1:
            raise UsageError(f'StaticPruningHook: batches={batches!r} must be 1 or more')
        self.batches = batches
        self.options: dict[str, Any] = dict(
            criterion=criterion, target=target, floor=floor, backbone=backbone, seed=seed
        )

    def before_train(self, runner: Runner) -> None:
        if runner.iter:
            return
        model: Any = unwrap(runner.model)

        def loss(data: Any) -> Tensor:
            data = model.data_preprocessor(data, True)
            if self.options['criterion'] != 'taylor':  # no labels
                pictures = one_batch(data['inputs'] if isinstance(data, dict) else data[0])
                return model.get_submodule(self.options['backbone'])(pictures)
            named = isinstance(data, dict)
            losses = model(**data, mode='loss') if named else model(*data, mode='loss')
            return model.parse_losses(losses)[0]

        batches = islice(self._loader(runner.train_dataloader), self.batches)
        with in_context('StaticPruningHook'):
            share = prune(model, batches=batches, loss=loss, **self.options)
        runner.logger.info(
            f'StaticPruningHook: the network executes {share:.3f} of the MACs of '
            f'{self.options["backbone"]!r}, by {self.options["criterion"]}'
        )

    def _loader(self, loader: DataLoader) -> DataLoader:
        """The pictures of the training in an order of their own: samplers without an end, as of
        trainings by iterations, would go on behind them or not at all."""
        generator = torch.Generator().manual_seed(self.options['seed'])  # the same on all ranks
        return DataLoader(
            loader.dataset,
            batch_size=getattr(loader.batch_sampler, 'batch_size', None) or 1,
            shuffle=True,
            collate_fn=loader.collate_fn,
            generator=generator,
        )
