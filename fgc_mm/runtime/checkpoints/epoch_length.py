# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Going on with epochs of another number of iterations, as with another number of ranks."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Optional

from mmengine.optim import _ParamScheduler
from mmengine.runner import EpochBasedTrainLoop, Runner


def epoch_length(runner: Runner) -> Optional[int]:
    """Iterations of an epoch, of loops that have epochs."""
    if not isinstance(runner.train_loop, EpochBasedTrainLoop):
        return None
    return len(runner.train_loop.dataloader)


class EpochLength:
    """Translates a resumed training into epochs of another length.

    mmengine takes the number of iterations and the schedules of learning rates
    over as they are, in iterations that were larger or smaller. Here they
    stand where a training with the new length would stand after as many epochs.
    """

    def __init__(self) -> None:
        self._fresh: list[tuple[_ParamScheduler, dict[str, Any], list[float]]] = []

    def keep(self, runner: Runner) -> None:
        """Note the schedules as they begin. To be called before anything is resumed."""
        self._fresh = []
        schedules = getattr(runner, 'param_schedulers', None) or []
        if isinstance(schedules, dict):
            # Several optimizers; or a config, where nothing is trained.
            groups = [several for several in schedules.values() if isinstance(several, list)]
            schedules = [schedule for several in groups for schedule in several]
        for schedule in schedules:
            if isinstance(schedule, _ParamScheduler):
                values = [group[schedule.param_name] for group in schedule.optimizer.param_groups]
                self._fresh.append((schedule, dict(schedule.state_dict()), values))

    def adapt(self, runner: Runner, before: Optional[int]) -> None:
        """Translate, if it is another length."""
        now, loop = epoch_length(runner), runner.train_loop
        if before is None or now is None or before == now:
            return
        loop._iter = round(loop._iter / before * now)
        runner.optim_wrapper.initialize_count_status(runner.model, loop.iter, loop.max_iters)
        notice = f'An epoch of the resumed checkpoint had {before} iterations, now it has {now}: '
        if any(getattr(schedule, 'need_val_args', False) for schedule, _, _ in self._fresh):
            notice += 'schedules keep their pace, as one of them depends on metrics'
        else:
            self._replay(loop.iter, now)
            notice += f'iterations and schedules go on from {loop.iter}'
        runner.logger.log(logging.WARNING, notice)

    def _replay(self, iterations: int, length: int) -> None:
        for schedule, state, values in self._fresh:
            schedule.load_state_dict(state)
            for group, value in zip(schedule.optimizer.param_groups, values, strict=True):
                group[schedule.param_name] = value
        with warnings.catch_warnings():  # that no step of the optimizer comes in between
            warnings.simplefilter('ignore')
            for done in range(1, iterations + 1):
                for schedule, _, _ in self._fresh:
                    if not schedule.by_epoch or done % length == 0:
                        schedule.step()
