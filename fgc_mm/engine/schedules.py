# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Values that change over the training, in epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union
from weakref import WeakKeyDictionary

from mmengine.dist import get_world_size
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch.utils.data import DataLoader

from ..datasets import count_instances

ScheduleCfg = Union[int, float, Mapping[str, Any]]


@dataclass(frozen=True)
class Schedule:
    """A value that runs linearly from ``begin`` to ``value``.

    Attributes:
        value (float): The value from epoch ``end`` on.
        start (float): Epoch the ramp starts at. Defaults to 0.
        end (float): Epoch the ramp ends at; the same as ``start`` is a step.
            Defaults to 0.
        begin (float): The value until epoch ``start``. Defaults to 0.
    """

    value: float
    start: float = 0.0
    end: float = 0.0
    begin: float = 0.0

    def at(self, epoch: float) -> float:
        """The value at an epoch, which may be fractional."""
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
            are epochs.
        key (str): What the value is called in the config, for errors.

    Raises:
        ValueError: If it is neither, or negative: a loss with a negative weight
            would be driven up.

    Returns:
        Schedule: The schedule.

    Example:
        >>> build_schedule(dict(start=0, end=100, begin=0.75, value=0), 'zeta').at(50)
        0.375
    """
    if isinstance(cfg, Mapping):
        allowed, needed = ('start', 'end', 'value', 'begin'), ('start', 'end', 'value')
        unknown = [name for name in cfg if name not in allowed]
        missing = [name for name in needed if name not in cfg]
        if unknown or missing:
            what = f'has no key {unknown[0]!r}' if unknown else f'lacks the key {missing[0]!r}'
            raise ValueError(
                f'{key}={dict(cfg)!r}: a schedule {what}; write a number or '
                f'dict(start=..., end=..., value=...) and, if not 0, begin=...'
            )
        values = {name: _number(cfg[name], f'{key}.{name}', _LEAST.get(name)) for name in cfg}
        schedule = Schedule(**values)
        if not 0 <= schedule.start <= schedule.end:
            raise ValueError(
                f'{key}: start={cfg["start"]} and end={cfg["end"]} must be epochs with '
                '0 <= start <= end'
            )
        return schedule
    return Schedule(value=_number(cfg, key, _LEAST['value']))


_LEAST = dict(value=0.0, begin=0.0)


def _number(value: Any, key: str, least: Optional[float]) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(
            f'{key}={value!r} must be a finite number, or for a whole schedule '
            'dict(start=..., end=..., value=...)'
        )
    if least is not None and value < least:
        raise ValueError(f'{key}={value!r} must be {least:g} or more')
    return float(value)


def epochs_seen(runner: Runner) -> float:
    """Instances seen by all ranks, over the number of training instances.

    Under an epoch-based loop that is the share of the loader's passes. An
    iteration-based loop leaves its epoch counter at 0; there it is iterations x
    batch size x ranks / length of the dataset. Either way a dataset that repeats
    its pictures passes several epochs at once, as :class:`FGCHook` counts it.
    Gradient accumulation does not matter.

    Args:
        runner (Runner): The runner, while it trains.

    Returns:
        float: Epochs, fractional.
    """
    loader = runner.train_dataloader
    if isinstance(runner.train_loop, EpochBasedTrainLoop):
        return runner.iter / len(loader) * _repeats(loader)
    batch_size = loader.batch_size or getattr(loader.batch_sampler, 'batch_size', None)
    if batch_size is None:
        raise ValueError(
            f'{type(loader.batch_sampler).__name__} tells no batch_size, so epochs cannot be '
            'counted; give it that attribute'
        )
    try:
        items = len(loader.dataset)
    except TypeError as error:
        raise ValueError(
            f'{type(loader.dataset).__name__} has no length, so epochs cannot be counted; give '
            'constant values instead of schedules'
        ) from error
    return runner.iter * batch_size * get_world_size() / items * _repeats(loader)


_REPEATS: WeakKeyDictionary[DataLoader, float] = WeakKeyDictionary()


def _repeats(loader: DataLoader) -> float:
    """How often a pass over the dataset shows each picture, on average."""
    if loader not in _REPEATS:
        items = len(loader.dataset)  # type: ignore[arg-type]
        _REPEATS[loader] = items / max(1, count_instances(loader.dataset))
    return _REPEATS[loader]
