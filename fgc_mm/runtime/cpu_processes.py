# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Several processes on machines without a GPU."""

from __future__ import annotations

import datetime
import os
import subprocess

import torch
import torch.distributed as torch_dist
from mmengine.config import Config
from mmengine.logging import print_log

from ..errors import UsageError
from .config.files import dicts_in


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
