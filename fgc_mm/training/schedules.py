# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Values that change over the training, in epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Optional, Union
from weakref import WeakKeyDictionary

from mmengine.dist import get_world_size
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch.utils.data import DataLoader

from ..datasets import count_instances
from ..errors import UsageError

ScheduleCfg = Union[int, float, Mapping[str, Any]]
BUDGET = 'budget'
"""In place of an epoch: when a BudgetHook has reached its target."""


@dataclass(frozen=True)
class Schedule:
    """A value that runs linearly from ``begin`` to ``value``.

    Attributes:
        value (float): The value from epoch ``end`` on.
        start (float | str): Epoch the ramp starts at, or ``'budget'``. Defaults to 0.
        end (float | str): Epoch the ramp ends at, or ``'budget'``; the same as
            ``start`` is a step. Defaults to 0.
        begin (float): The value until epoch ``start``. Defaults to 0.
    """

    value: float
    start: Union[float, str] = 0.0
    end: Union[float, str] = 0.0
    begin: float = 0.0

    def settled(self, runner: Runner, key: str) -> Schedule:
        """The same schedule with epochs in place of ``'budget'``; a ramp that starts with the
        budget rises within one epoch. The key is for errors."""
        if BUDGET not in (self.start, self.end):
            return self
        # Any hook that says when it is done; BudgetHook does.
        reached = [hook.reached_at(runner) for hook in runner.hooks if hasattr(hook, 'reached_at')]
        if not reached:
            raise UsageError(
                f"{key}: 'budget' waits for a BudgetHook, and custom_hooks have none; add "
                "dict(type='BudgetHook', target=...), or give an epoch instead"
            )
        epoch = epochs_seen(runner, reached[0])
        if self.start == BUDGET:
            return replace(self, start=epoch, end=epoch + 1)
        return replace(self, start=min(float(self.start), epoch), end=epoch)

    def at(self, epoch: float) -> float:
        """The value at an epoch, which may be fractional."""
        if isinstance(self.start, str) or isinstance(self.end, str):
            raise UsageError(f'{self}: call settled() first')
        if epoch >= self.end:
            return self.value
        if epoch <= self.start:
            return self.begin
        done = (epoch - self.start) / (self.end - self.start)
        return self.begin + done * (self.value - self.begin)

    def now(self, runner: Runner) -> float:
        """The value at this iteration of the training."""
        # A constant does not ask for epochs, which not every dataset can tell.
        return self.value if self.end == 0 else self.at(epochs_seen(runner))


def build_schedule(cfg: ScheduleCfg, key: str) -> Schedule:
    """A schedule from a config value.

    Args:
        cfg (float | dict): A number, constant from the first iteration on, or
            ``dict(start=..., end=..., value=...)`` with an optional ``begin``,
            the value before ``start`` (0 unless given). ``start`` and ``end``
            are epochs. Either may be ``'budget'``: when a BudgetHook has reached its
            target. With ``start='budget'`` there is no ``end``.
        key (str): What the value is called in the config, for errors.

    Raises:
        UsageError: If it is neither, or negative: a loss with a negative weight
            would be driven up.

    Example:
        >>> build_schedule(dict(start=0, end=100, begin=0.75, value=0), 'zeta').at(50)
        0.375
    """
    if isinstance(cfg, Mapping):
        allowed, needed = ('start', 'end', 'value', 'begin'), ['start', 'end', 'value']
        if cfg.get('start') == BUDGET:
            if 'end' in cfg:
                raise UsageError(
                    f"{key}={dict(cfg)!r}: with start='budget' the value rises within one epoch; "
                    'leave end out'
                )
            needed.remove('end')
        unknown = [name for name in cfg if name not in allowed]
        missing = [name for name in needed if name not in cfg]
        if unknown or missing:
            what = f'has no key {unknown[0]!r}' if unknown else f'lacks the key {missing[0]!r}'
            raise UsageError(
                f'{key}={dict(cfg)!r}: a schedule {what}; write a number or '
                f'dict(start=..., end=..., value=...) and, if not 0, begin=...'
            )
        named = {name: cfg[name] for name in ('start', 'end') if cfg.get(name) == BUDGET}
        values = {
            name: _number(cfg[name], f'{key}.{name}', _LEAST.get(name))
            for name in cfg
            if name not in named
        }
        schedule = Schedule(**{**values, **named})
        first = 0.0 if isinstance(schedule.start, str) else schedule.start
        last = first if isinstance(schedule.end, str) or 'start' in named else schedule.end
        if not 0 <= first <= last:
            raise UsageError(
                f'{key}: start={cfg["start"]} and end={cfg["end"]} must be epochs with '
                '0 <= start <= end'
            )
        return schedule
    return Schedule(value=_number(cfg, key, _LEAST['value']))


_LEAST = dict(value=0.0, begin=0.0)


def _number(value: Any, key: str, least: Optional[float]) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(
            f'{key}={value!r} must be a finite number, or for a whole schedule '
            'dict(start=..., end=..., value=...)'
        )
    if least is not None and value < least:
        raise UsageError(f'{key}={value!r} must be {least:g} or more')
    return float(value)


def epochs_seen(runner: Runner, iteration: Optional[float] = None) -> float:
    """Instances seen by all ranks, over the number of training instances.

    Under an epoch-based loop that is the share of the loader's passes. An
    iteration-based loop leaves its epoch counter at 0; there it is iterations x
    batch size x ranks / length of the dataset. Either way a dataset that repeats
    its pictures passes several epochs at once, as :class:`FGCHook` counts it.
    Gradient accumulation does not matter.

    Args:
        runner (Runner): The runner, while it trains.
        iteration (float, optional): The iteration that is asked about.
            Defaults to None, the one the runner is at.
    """
    iteration = runner.iter if iteration is None else iteration
    loader = runner.train_dataloader
    if isinstance(runner.train_loop, EpochBasedTrainLoop):
        return iteration / len(loader) * _repeats(loader)
    batch_size = loader.batch_size or getattr(loader.batch_sampler, 'batch_size', None)
    if batch_size is None:
        raise UsageError(
            f'{type(loader.batch_sampler).__name__} tells no batch_size, so epochs cannot be '
            'counted; give it that attribute'
        )
    try:
        items = len(loader.dataset)
    except TypeError as error:
        raise UsageError(
            f'{type(loader.dataset).__name__} has no length, so epochs cannot be counted; give '
            'constant values instead of schedules'
        ) from error
    return iteration * batch_size * get_world_size() / items * _repeats(loader)


_REPEATS: WeakKeyDictionary[DataLoader, float] = WeakKeyDictionary()


def _repeats(loader: DataLoader) -> float:
    """How often a pass over the dataset shows each picture, on average."""
    if loader not in _REPEATS:
        items = len(loader.dataset)  # type: ignore[arg-type]
        _REPEATS[loader] = items / max(1, count_instances(loader.dataset))
    return _REPEATS[loader]
