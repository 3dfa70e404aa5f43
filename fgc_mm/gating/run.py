# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Training a gated network from a dense one, and what comes out."""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.dist import broadcast_object_list, is_main_process
from mmengine.hooks import Hook
from mmengine.runner import CheckpointLoader, Runner

from ..errors import FgcError, UsageError
from ..evaluation.checkpoint_fit import CheckpointFitHook, check_fit
from ..files import write_files
from ..runtime import SafeCheckpointHook, launch, unwrap
from ..runtime.checkpoints.resume_point import go_on
from ..training.distillation.teacher import dense_copy, fill, read_weights
from ..training.new_gates_hook import NewGatesHook
from .recipe import final_config, training_config
from .report import compare, milliseconds, task_metrics

_PLAN = 'gate.json'
_TRIAL = 8
"""Steps of the trial that tells how long one takes; the first few are slower."""
_FOR_TRAINING = 0.85
"""Part of the time that is given to training; the rest is for validations and the report."""


@dataclass
class GatePlan:
    """What is asked for.

    Attributes:
        target (float): Share of the backbone's MACs to execute.
        static (bool): The same channels for all pictures.
        pictures (str, optional): Folder of pictures; None for those of the config's training.
        steps (int, optional): Length of the training.
        minutes (float, optional): In place of it, how long it may take.
    """

    target: float
    static: bool = False
    pictures: Optional[str] = None
    steps: Optional[int] = None
    minutes: Optional[float] = None

    def check(self) -> None:
        """Refuse what is out of range."""
        if not 0 < self.target < 1:
            raise UsageError(
                f'target={self.target!r} must be within (0, 1), the share of the MACs to execute'
            )
        if self.steps is not None and self.steps < 1:
            raise UsageError(f'steps={self.steps!r} must be 1 or more')
        if self.minutes is not None and not self.minutes > 0:
            raise UsageError(f'minutes={self.minutes!r} must be positive')


def gate_checkpoint(
    cfg: Config, checkpoint: str, plan: GatePlan, resume: bool = False
) -> tuple[dict[str, Path], dict[str, Any]]:
    """Train a gated network to compute what a dense one does, on pictures without annotations.

    Args:
        cfg (Config): Of the dense network; its ``work_dir`` is where everything is written.
        checkpoint (str): Its weights.
        plan (GatePlan): What is asked for.
        resume (bool): Go on with the training in the work dir. Defaults to False.

    Returns:
        tuple: The files written (``config``, ``checkpoint``, ``report``), and the report. Both are
        empty on other processes than the first.

    Raises:
        FgcError: In one message, before anything but logs is written.
    """
    plan.check()
    work_dir = Path(cfg.work_dir)
    if resume:
        _same_plan(plan, work_dir)
    launch.fill_dataloader_defaults(cfg)
    if plan.pictures is None:
        launch.prepare_data(cfg, ())  # that of the demos is made
    steps = plan.steps
    if steps is None:
        steps = _steps_for(cfg, checkpoint, plan)
    train, dropped = training_config(
        cfg, checkpoint, plan.target, plan.static, plan.pictures, steps
    )
    if resume:
        go_on(train)
    runner = _runner(train, checkpoint)
    for kind in dropped:
        runner.logger.info(f'{kind} is left out of the training pipeline: it needs annotations')
    if is_main_process():
        kept = dict(asdict(plan), steps=steps, minutes=None)
        write_files({work_dir / _PLAN: json.dumps(kept)})
    runner.train()
    gated = unwrap(runner.model)
    report = _report(cfg, runner, gated, checkpoint)
    if not is_main_process():
        return {}, {}
    report.update(target=plan.target, static=plan.static, steps=steps)
    batch = int(train.train_dataloader.get('batch_size') or 1)
    return _write(cfg, gated, checkpoint, plan, batch, report), report


def _runner(train: Config, checkpoint: str) -> Runner:
    launch.prepare(train, splits=('train',))
    runner = launch.build_runner(train)
    SafeCheckpointHook.of(runner)
    if not train.resume:
        runner.register_hook(CheckpointFitHook(checkpoint))
    runner.register_hook(NewGatesHook())
    return runner


def _same_plan(plan: GatePlan, work_dir: Path) -> None:
    """Take the length of the training that is resumed over, and see that it is the same one."""
    path = work_dir / _PLAN
    if not path.is_file():
        raise UsageError(f'--resume: {work_dir} has no training of fgc gate to go on with')
    before = GatePlan(**json.loads(path.read_text()))
    plan.minutes = None
    plan.steps = plan.steps or before.steps
    for name, value in asdict(before).items():
        if value != getattr(plan, name):
            raise UsageError(
                f'--resume: the training in {work_dir} was begun with {name}={value!r}, not '
                f'{getattr(plan, name)!r}; say the same, or start anew without --resume'
            )


class _Clock(Hook):
    """When each step of a trial began."""

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self.times: list[float] = []

    def before_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())


def _steps_for(cfg: Config, checkpoint: str, plan: GatePlan) -> int:
    """How many steps there is time for, from a short trial that leaves nothing."""
    trial, _ = training_config(cfg, checkpoint, plan.target, plan.static, plan.pictures, _TRIAL)
    trial.default_hooks.checkpoint = None
    trial.val_dataloader = trial.val_cfg = trial.val_evaluator = None
    trial.train_cfg.pop('val_interval')
    trial.experiment_name = f'trial_{time.time_ns()}'
    if not plan.static:  # too short to reach anything
        trial.custom_hooks[0].update(target=0.99, check_interval=_TRIAL + 1)
    with tempfile.TemporaryDirectory() as folder:
        trial.work_dir = folder
        runner, clock = _runner(trial, checkpoint), _Clock()
        runner.register_hook(clock)
        runner.train()
        for handler in list(runner.logger.handlers):  # the folder will be gone
            if isinstance(handler, logging.FileHandler):
                runner.logger.removeHandler(handler)
                handler.close()
    each = (clock.times[-1] - clock.times[2]) / (len(clock.times) - 3)
    steps = [max(1, int(_FOR_TRAINING * 60 * (plan.minutes or 0) / each))]
    broadcast_object_list(steps)
    return steps[0]


def _report(cfg: Config, runner: Runner, gated: nn.Module, checkpoint: str) -> dict[str, Any]:
    dense = dense_copy(gated)
    fill(dense, read_weights(checkpoint), '', checkpoint)
    loader = runner.val_dataloader
    found = compare(dense, gated, loader)
    single = copy.deepcopy(runner.cfg.val_dataloader)
    single.batch_size = 1
    found['milliseconds'] = milliseconds(dense, gated, runner.build_dataloader(single))
    found['metrics'], found['no_metrics'] = {}, None
    for split in ('val', 'test'):
        data, evaluator = cfg.get(f'{split}_dataloader'), cfg.get(f'{split}_evaluator')
        if data is None or evaluator is None:
            found['no_metrics'] = found['no_metrics'] or 'the config has no labeled pictures'
            continue
        try:
            launch.prepare_data(cfg, (split,))
            models = dict(dense=dense, gated=gated)
            found['metrics'] = task_metrics(runner, models, data, evaluator)
            break
        except FgcError as error:
            found['no_metrics'] = str(error)
    return found


def _write(
    cfg: Config,
    gated: nn.Module,
    checkpoint: str,
    plan: GatePlan,
    batch: int,
    report: dict[str, Any],
) -> dict[str, Path]:
    folder = Path(cfg.work_dir)
    stem = Path(str(cfg.filename)).stem
    files = dict(
        config=folder / f'{stem}_gated.py',
        checkpoint=folder / f'{Path(checkpoint).stem}_gated.pth',
        report=folder / f'{stem}_gated.json',
    )
    final = final_config(cfg, plan.target, plan.static, batch, os.path.abspath(files['checkpoint']))
    loaded = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu', logger='silent')
    state = gated.state_dict()
    for key, value in state.items():
        state[key] = value.detach().cpu()
    meta = dict(loaded.get('meta') or {}) if isinstance(loaded, dict) else {}
    content = dict(meta={**meta, 'cfg': final.pretty_text}, state_dict=state)
    check_fit(gated, content, str(files['checkpoint']))
    write_files(
        {
            files['checkpoint']: partial(torch.save, content),
            files['config']: final.pretty_text,
            files['report']: json.dumps(report, indent=2, default=float) + '\n',
        }
    )
    return files
