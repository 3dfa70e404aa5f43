# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Random states in the checkpoint, so that a resumed run repeats an uninterrupted one."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import numpy as np
import torch
from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

State = dict[str, Any]


@HOOKS.register_module()
class RandomStateHook(Hook):
    """Saves what mmengine forgets, and restores it on resuming.

    That is, for every rank, the states of torch's, NumPy's and Python's
    generators, and the seed of the sampler, which is drawn anew if the config
    gives none. :class:`SafeCheckpointHook` brings this hook along.

    Validation and the start of workers draw from the same generators, and a
    resumed run repeats neither. Both are therefore kept from changing the states
    of the training.

    A resumed run is then, on a CPU, the uninterrupted one bit for bit, if it
    loads without workers, or epoch by epoch with workers that are not
    persistent, and if accumulated gradients are not cut in two by the
    checkpoint. With another number of ranks it starts with states of its own.
    """

    # After whatever draws, before CheckpointHook saves.
    priority = 'LOW'

    def __init__(self) -> None:
        self._loaded: Optional[State] = None
        self._gathered: tuple[int, list[Optional[State]]] = (-1, [])
        self._before_val: Optional[State] = None
        self._iters = 0

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Also called for load_from and testing: whether it is of use shows later.
        self._loaded = checkpoint.get('random_states')

    def before_train(self, runner: Runner) -> None:
        loader = runner.train_dataloader
        if loader.generator is None:
            # Otherwise each new iterator draws from the states of the training.
            loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        loaded, self._loaded = self._loaded, None
        if not runner.iter:  # a fresh run, whatever weights it starts from
            return
        states = loaded['ranks'] if loaded is not None else []
        if len(states) != get_world_size() or states[get_rank()] is None:
            runner.logger.log(
                logging.WARNING,
                f'the checkpoint holds the random states of {len(states)} ranks, and there are '
                f'{get_world_size()}: this run goes on with others',
            )
        else:
            _set_state(states[get_rank()], loader.generator)
            restore = partial(_set_state, states[get_rank()], loader.generator)
            _restore_after_skipping(runner, restore)
        seed = loaded.get('sampler_seed') if loaded is not None else None
        if seed is not None and hasattr(_sampler(loader), 'seed'):
            _sampler(loader).seed = seed

    def before_val(self, runner: Runner) -> None:
        self._before_val = _get_state(_generator(runner))

    def after_val(self, runner: Runner) -> None:
        if self._before_val is not None:
            _set_state(self._before_val, _generator(runner))
        self._before_val = None

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Optional[dict] = None,
    ) -> None:
        self._iters += 1
        # Checkpoints are saved by one rank; the others have to speak up before.
        if get_world_size() > 1 and checkpoint_due(runner):
            self._gather(runner)

    def after_train_epoch(self, runner: Runner) -> None:
        if get_world_size() > 1:
            self._gather(runner)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        states: list[Optional[State]]
        if get_world_size() == 1:
            states = [self._before_val or _get_state(_generator(runner))]
        else:
            when, states = self._gathered
            if when != self._iters:
                states = [None] * get_world_size()
        seed = getattr(_sampler(runner.train_dataloader), 'seed', None)
        checkpoint['random_states'] = dict(ranks=states, sampler_seed=seed)

    def _gather(self, runner: Runner) -> None:
        self._gathered = self._iters, all_gather_object(_get_state(_generator(runner)))


class _Skipping:
    """The iterator of an iteration-based loop that is resumed. Loading the batches it skips draws
    from the generators: their states are restored before the first batch to train on.

    Args:
        loop (Any): The loop, which gets its own iterator back then.
        skipped (int): How many batches it loads to skip them, without :meth:`skip_iter`.
        restore (Callable): Sets the states.
    """

    def __init__(self, loop: Any, skipped: int, restore: Callable[[], None]) -> None:
        self.loop, self.skipped, self.restore = loop, skipped, restore
        self.inner = loop.dataloader_iterator

    def skip_iter(self, count: int) -> None:
        self.inner.skip_iter(count)

    def __next__(self) -> Any:
        if self.skipped:
            self.skipped -= 1
        else:
            self.restore()
            self.loop.dataloader_iterator = self.inner
        return next(self.inner)


def _restore_after_skipping(runner: Runner, restore: Callable[[], None]) -> None:
    """Have an iteration-based loop restore random states after it has skipped batches."""
    loop: Any = runner.train_loop
    inner = getattr(loop, 'dataloader_iterator', None)
    if inner is not None:
        # Newer versions of mmengine skip by a call of its own, older ones batch by batch.
        skipped = 0 if hasattr(inner, 'skip_iter') else runner.iter
        loop.dataloader_iterator = _Skipping(loop, skipped, restore)


def _sampler(loader: Any) -> Any:
    outer = getattr(loader, 'batch_sampler', None)
    return getattr(outer, 'sampler', None) or getattr(loader, 'sampler', None)


def _generator(runner: Runner) -> Optional[torch.Generator]:
    """The loader's, if this is a training."""
    return getattr(getattr(runner.train_loop, 'dataloader', None), 'generator', None)


def checkpoint_due(runner: Runner) -> bool:
    """Whether a checkpoint is saved after this iteration."""
    hooks = [h for h in runner.hooks if isinstance(h, CheckpointHook) and not h.by_epoch]
    return any(
        h.every_n_train_iters(runner, h.interval, h.save_begin)
        or (h.save_last and h.is_last_train_iter(runner))
        for h in hooks
    )


def _get_state(generator: Optional[torch.Generator]) -> State:
    """The states, as tensors and numbers only."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, next_gauss = random.getstate()
    state: State = dict(
        torch=torch.get_rng_state(),
        numpy=torch.from_numpy(np.asarray(keys).astype(np.int64)),
        numpy_rest=[int(position), int(has_gauss), float(gauss)],
        python=torch.tensor(numbers, dtype=torch.int64),
        python_rest=[version, next_gauss],
    )
    if torch.cuda.is_available():
        state['cuda'] = torch.cuda.get_rng_state()
    if generator is not None:
        state['loader'] = generator.get_state()
    return state


def _set_state(state: State, generator: Optional[torch.Generator]) -> None:
    torch.set_rng_state(state['torch'].cpu())
    position, has_gauss, gauss = state['numpy_rest']
    keys = state['numpy'].cpu().numpy().astype(np.uint32)
    np.random.set_state(('MT19937', keys, position, has_gauss, gauss))
    version, next_gauss = state['python_rest']
    random.setstate((version, tuple(state['python'].tolist()), next_gauss))
    if 'cuda' in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'].cpu())
    if generator is not None and 'loader' in state:
        generator.set_state(state['loader'].cpu())
