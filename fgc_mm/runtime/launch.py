# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""From a config to a Runner: what has to be there, and one message where it is not."""

from __future__ import annotations

import copy
import datetime
import os
import subprocess
from typing import Optional

import torch
import torch.distributed as torch_dist
from mmengine.config import Config, ConfigDict
from mmengine.logging import print_log
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
from .config.check import check_config, check_run_settings
from .config.files import dicts_in
from .first_step import watch_first_steps
from .messages import explained
from .module_hooks import Attachments
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


def prepare_distributed(cfg: Config) -> None:
    """Start gloo where there is no GPU.

    mmengine's launchers select a CUDA device and hand it to DDP; with the
    process group already there, and no device ids, the same Runner trains on
    CPUs.
    """
    if cfg.launcher == 'none' or torch.cuda.is_available():
        return
    env = _launcher_environment(cfg.launcher)
    os.environ.update(env)
    missing = [
        k for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT') if k not in os.environ
    ]
    if missing:
        raise UsageError(
            f'--launcher {cfg.launcher}: {", ".join(missing)} not set in the environment; '
            'start the tool with tools/dist_train.sh, torchrun or srun'
        )
    timeout = cfg.get('env_cfg', {}).get('dist_cfg', {}).get('timeout', 1800)
    if not torch_dist.is_initialized():
        torch_dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=timeout))
    wrapper = dict(
        type='MMDistributedDataParallel',
        broadcast_buffers=False,
        find_unused_parameters=cfg.get('find_unused_parameters', False),
    )
    wrapper.update(cfg.get('model_wrapper_cfg') or {})
    wrapper['device_ids'] = None
    cfg.model_wrapper_cfg = wrapper
    synced = [node for _, node in dicts_in(cfg.model) if node.get('type') == 'SyncBN']
    for node in synced:
        node['type'] = 'BN'
    if synced:
        print_log('SyncBN has no CPU version: every process normalizes on its own', 'current')


def _launcher_environment(launcher: str) -> dict[str, str]:
    """What torch.distributed reads, from what slurm sets."""
    given = os.environ
    if launcher != 'slurm' or 'SLURM_PROCID' not in given:
        return {}
    env = dict(
        RANK=given['SLURM_PROCID'],
        WORLD_SIZE=given['SLURM_NTASKS'],
        LOCAL_RANK=given.get('SLURM_LOCALID', '0'),
        MASTER_PORT=given.get('MASTER_PORT', '29500'),
    )
    if 'MASTER_ADDR' not in given:
        hosts = ['scontrol', 'show', 'hostname', given['SLURM_NODELIST']]
        env['MASTER_ADDR'] = subprocess.check_output(hosts, text=True).split()[0]
    return env


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
    """Build the Runner; what a config gets wrong is one message.

    The config of an earlier run, which made the files in the work dir, stays there until this one
    has done its first step.
    """
    kept = Attachments()
    kept.replace(Runner, 'dump_config', lambda runner: None)
    try:
        with explained('the config cannot be built'):
            own = 'runner_type' in cfg
            runner = RUNNERS.build(cfg) if own else Runner.from_cfg(copy.deepcopy(cfg))
    except Exception as error:
        reason = error.__cause__ or error
        if isinstance(reason, OSError) and reason.errno in DISK_FULL:
            raise UsageError(
                f'{reason.strerror}: the work dir {cfg.work_dir} cannot be written; make room, or '
                'name another by --work-dir'
            ) from error
        raise
    finally:
        kept.remove()
    watch_first_steps(runner)
    runner.register_hook(WorkDirHook())
    if not any(isinstance(hook, FiniteHook) for hook in runner.hooks):
        runner.register_hook(FiniteHook())
    return runner
