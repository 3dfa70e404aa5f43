# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""From a config to a Runner: what has to be there, and one message where it is not."""

from __future__ import annotations

import copy
from typing import Optional

from mmengine.config import Config, ConfigDict
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from ..datasets import check_dataset_paths, ensure_demo_data
from ..errors import FgcError, UsageError
from ..files import check_folder
from ..tasks import TASKS, task_of, task_of_hook
from .checkpoints.resume_point import go_on
from .checkpoints.safe_checkpoint_hook import DISK_FULL
from .checkpoints.start_weights import check_start_weights
from .checkpoints.work_dir_paths import WorkDirHook
from .config.check import check_config
from .config.settings import check_run_settings
from .cpu_processes import prepare_distributed
from .first_step import KeptConfig, watch_first_steps
from .messages import explained
from .numbers.finite_hook import FiniteHook


def prepare(cfg: Config, splits: tuple[str, ...]) -> None:
    """Everything between the config and the Runner: weights, data, processes, defaults."""
    check_run_settings(cfg)
    check_folder(cfg.get('work_dir', 'work_dirs'), '--work-dir')
    with explained('the config cannot be built'):
        check_config(cfg, splits)
    if splits and cfg.get(f'{splits[0]}_dataloader') is None:
        raise UsageError(f'the config has no {splits[0]}_dataloader to take pictures from')
    lacking = []
    for step in (prepare_weights, prepare_data) if 'train' in splits else (prepare_data,):
        try:
            step(cfg, splits)
        except FgcError as error:  # weights and data are told together
            lacking.append(str(error))
    if lacking:
        raise UsageError('\n'.join(lacking))
    fill_dataloader_defaults(cfg)
    prepare_distributed(cfg)


def prepare_weights(cfg: Config, splits: tuple[str, ...]) -> None:
    """See that the weights a training starts from are there."""
    if cfg.get('resume') and cfg.get('load_from') is None:
        go_on(cfg)
    check_start_weights(cfg)


def prepare_data(cfg: Config, splits: tuple[str, ...]) -> None:
    """Build the demo data if the config asks for it, and see that the data is there."""
    if cfg.get('demo_data'):
        ensure_demo_data(**cfg.demo_data)
    check_dataset_paths(cfg, splits)


def fill_dataloader_defaults(cfg: Config) -> None:
    """Set what a config leaves to the tools of its package, as mmpretrain's how to collate."""
    for field in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        if cfg.get(field) is not None:
            task_of(cfg).fill_loader(cfg[field])


def draw_predictions(cfg: Config, show: bool, show_dir: Optional[str], wait_time: float) -> None:
    """Turn the task's own visualization hook on."""
    hook = cfg.default_hooks.get('visualization')
    if hook is None:
        known = ', '.join(
            f"dict(type='{task.visualization_hook}') for {task.scope}"
            for task in TASKS.values()
            if task.visualization_hook
        )
        raise UsageError(
            '--show and --show-dir need a visualization hook: set default_hooks.visualization in '
            f'the config ({known})'
        )
    hook.update(show=show, wait_time=wait_time)
    name = hook.type if isinstance(hook.type, str) else hook.type.__name__
    task_of_hook(name).draw(cfg, hook, show_dir)


def augment_test_time(cfg: Config) -> None:
    """Wrap the model into the config's test-time augmentation."""
    if 'tta_model' not in cfg or 'tta_pipeline' not in cfg:
        raise UsageError('--tta: the config has no tta_model and tta_pipeline')
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline


def build_runner(cfg: Config) -> Runner:
    """Build the Runner; what a config gets wrong is one message."""
    kept = KeptConfig(cfg)
    try:
        with explained('the config cannot be built'):
            own = 'runner_type' in cfg
            runner = RUNNERS.build(cfg) if own else Runner.from_cfg(copy.deepcopy(cfg))
    except Exception as error:
        reason = error.__cause__ or error
        if isinstance(reason, OSError) and reason.errno in DISK_FULL:
            kept.put_back()
            raise UsageError(
                f'{reason.strerror}: the work dir {cfg.work_dir} cannot be written; make room, or '
                'name another by --work-dir'
            ) from error
        raise
    watch_first_steps(runner, kept)
    runner.register_hook(WorkDirHook())
    if not any(isinstance(hook, FiniteHook) for hook in runner.hooks):
        runner.register_hook(FiniteHook())
    return runner
