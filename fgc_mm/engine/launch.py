# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""From command-line arguments to a Runner, shared by the tools."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import datetime
import difflib
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Optional

import torch
import torch.distributed as torch_dist
from mmengine.config import Config, ConfigDict
from mmengine.logging import print_log
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from fgc_mm.datasets import BrokenDataError, check_dataset_paths, ensure_demo_data

from .cfg_options import CfgOptions, merge_options
from .checkpoint_file import checkpoint_fault
from .gate_loss_hook import SetupError
from .guard import KeptConfig, guard
from .mistakes import RunError, UsageError, explained, sentence
from .places import check_file, check_folder
from .run_settings import check_run_settings
from .start_weights import check_start_weights

__all__ = [
    'CfgOptions',
    'RunError',
    'UsageError',
    'add_common_arguments',
    'augment_test_time',
    'build_runner',
    'check_file',
    'check_folder',
    'draw_predictions',
    'existing',
    'explained',
    'fill_dataloader_defaults',
    'load_config',
    'merge_options',
    'prepare',
    'prepare_data',
    'prepare_distributed',
    'prepare_weights',
    'read_config',
    'run',
]


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """The options train and test share, as OpenMMLab users know them."""
    parser.add_argument('--work-dir', help='where logs, checkpoints and results go')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=CfgOptions,
        help='override settings of the config, as key=value; lists as key="[a,b]" or key=a,b',
    )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='job launcher; without a GPU the processes talk through gloo',
    )
    # torch.distributed.launch hands the local rank over as an argument.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)


def read_config(path: str) -> Config:
    """Read a config file.

    Raises:
        UsageError: If the file does not exist or cannot be read as a config.
    """
    if not Path(path).is_file():
        raise UsageError(f'config {path} does not exist{_suggestion(Path(path))}')
    try:
        return Config.fromfile(path)
    except ImportError as error:
        reason = error.__cause__ or error  # mmengine adds the whole search path
        raise UsageError(f'config {path} needs a package that is missing: {reason}') from error
    except SyntaxError as error:
        raise UsageError(f'config {path} is no valid Python: {error}') from error
    except Exception as error:  # a config is Python and may raise anything
        raise UsageError(f'config {path} cannot be read: {sentence(error)}') from error


def load_config(args: argparse.Namespace) -> Config:
    """Read the config and merge the common arguments into it.

    Raises:
        UsageError: If the file does not exist or cannot be read as a config.
    """
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = read_config(args.config)
    merge_options(cfg, args.cfg_options)
    if 'model' not in cfg:
        raise UsageError(f'config {args.config} has no `model`: it is a fragment for `_base_`')
    if not isinstance(cfg.model, dict):
        raise UsageError(f'config {args.config}: model={cfg.model!r} must be a dict')
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = os.path.join('work_dirs', Path(args.config).stem)
    return cfg


def _suggestion(path: Path) -> str:
    known = {p.stem: p for p in Path('configs').rglob('*.py')} if Path('configs').is_dir() else {}
    near = difflib.get_close_matches(path.stem, known, n=3)
    if near:
        return '; did you mean ' + ' or '.join(str(known[name]) for name in near) + '?'
    return '; the ones that come with fgc_mm are under configs/'


def existing(checkpoint: str) -> str:
    """The path of a checkpoint that is there, and may be one."""
    if '://' in checkpoint:
        return checkpoint
    if not os.path.exists(checkpoint):
        raise UsageError(f'checkpoint {checkpoint} does not exist')
    fault = checkpoint_fault(checkpoint)
    if fault is not None:
        raise UsageError(fault)
    return checkpoint


def prepare(cfg: Config, splits: tuple[str, ...]) -> None:
    """Everything between the config and the Runner: weights, data, processes, defaults."""
    check_run_settings(cfg)
    check_folder(cfg.get('work_dir', 'work_dirs'), '--work-dir')
    if splits and cfg.get(f'{splits[0]}_dataloader') is None:
        raise UsageError(f'the config has no {splits[0]}_dataloader to take pictures from')
    if 'train' in splits:
        prepare_weights(cfg)
    prepare_data(cfg, splits)
    fill_dataloader_defaults(cfg)
    prepare_distributed(cfg)


def prepare_weights(cfg: Config) -> None:
    """See that the weights a training starts from are there."""
    try:
        check_start_weights(cfg)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from error


def prepare_data(cfg: Config, splits: tuple[str, ...]) -> None:
    """Build the demo data if the config asks for it, and see that the data is there."""
    demo = cfg.get('demo_data')
    if demo:
        try:
            ensure_demo_data(**demo)
        except ImportError as error:
            raise UsageError(str(error)) from error
    try:
        check_dataset_paths(cfg, splits)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error


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
            'start the tool with tools/dist_train.sh, torchrun, srun or mpirun'
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
    if _replace_sync_bn(cfg.model):
        print_log('SyncBN has no CPU version: every process normalises on its own', 'current')


def _replace_sync_bn(node: Any) -> int:
    """Write BN for every SyncBN of a model's config; how many there were."""
    if isinstance(node, (list, tuple)):
        return sum(_replace_sync_bn(item) for item in node)
    if not isinstance(node, dict):
        return 0
    inside = sum(_replace_sync_bn(value) for value in node.values())
    if node.get('type') != 'SyncBN':
        return inside
    node['type'] = 'BN'
    return inside + 1


def _launcher_environment(launcher: str) -> dict[str, str]:
    """What torch.distributed reads, from what slurm and mpi set."""
    given = os.environ
    if launcher == 'slurm' and 'SLURM_PROCID' in given:
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
    if launcher == 'mpi' and 'OMPI_COMM_WORLD_RANK' in given:
        return dict(
            RANK=given['OMPI_COMM_WORLD_RANK'],
            WORLD_SIZE=given['OMPI_COMM_WORLD_SIZE'],
            LOCAL_RANK=given['OMPI_COMM_WORLD_LOCAL_RANK'],
            MASTER_PORT=given.get('MASTER_PORT', '29500'),
        )
    return {}


def fill_dataloader_defaults(cfg: Config) -> None:
    """mmpretrain's configs leave to its own tools how samples are collated."""
    if cfg.get('default_scope') != 'mmpretrain':
        return
    for field in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        if cfg.get(field) is not None:
            cfg[field].setdefault('collate_fn', dict(type='default_collate'))
            cfg[field].setdefault('pin_memory', torch.cuda.is_available())


def draw_predictions(cfg: Config, show: bool, show_dir: Optional[str], wait_time: float) -> None:
    """Turn the task's own visualization hook on."""
    hook = cfg.default_hooks.get('visualization')
    if hook is None:
        raise UsageError(
            '--show and --show-dir need a visualization hook: set default_hooks.visualization in '
            "the config (dict(type='DetVisualizationHook') for mmdet, 'SegVisualizationHook' for "
            "mmseg, 'VisualizationHook' for mmpretrain)"
        )
    hook.update(show=show, wait_time=wait_time)
    name = hook.type if isinstance(hook.type, str) else hook.type.__name__
    name = name.rpartition('.')[2]
    if name == 'VisualizationHook':  # mmpretrain's
        hook.update(enable=True, interval=1)
        if show_dir:
            hook.update(out_dir=show_dir)
        return
    hook.update(draw=True)
    if show_dir and name == 'DetVisualizationHook':
        # mmdet puts a relative folder under <work_dir>/<timestamp>
        hook.update(test_out_dir=os.path.abspath(show_dir))
    elif show_dir:
        cfg.visualizer.save_dir = show_dir
        backends = cfg.visualizer.setdefault('vis_backends', [])
        if not backends:
            backends.append(dict(type='LocalVisBackend'))


def augment_test_time(cfg: Config) -> None:
    """Wrap the model into the config's test-time augmentation."""
    if 'tta_model' not in cfg or 'tta_pipeline' not in cfg:
        raise UsageError('--tta: the config has no tta_model and tta_pipeline')
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline


def build_runner(cfg: Config) -> Runner:
    """Build the Runner; what a config gets wrong is one message."""
    kept = KeptConfig(cfg)
    with explained('the config cannot be built'):
        runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(copy.deepcopy(cfg))
    guard(runner, kept)
    return runner


def run(main: Callable[[], Any], subject: Optional[str] = None) -> None:
    """Call a tool's main function; usage errors become one message, exit code 2.

    Args:
        main (Callable): The function.
        subject (str, optional): What to say of all other errors, such as 'the
            test failed'. Defaults to None, for what runs for days: they end with
            a traceback and a sentence, exit code 1.
    """
    code = 0
    try:
        with explained(subject) if subject else contextlib.nullcontext():
            main()
    except (UsageError, SetupError) as error:
        code = 2
        if int(os.environ.get('RANK', 0)) == 0 or isinstance(error, RunError):
            print(f'error: {error}', file=sys.stderr)
    except BrokenDataError as error:  # met by one rank only; out of a worker with a traceback
        code = 2
        print(
            f'error: {re.split("Broken[a-zA-Z]+Error: ", str(error))[-1].strip()}', file=sys.stderr
        )
    except Exception as error:  # in the middle of a run: where matters, too
        code = 1
        traceback.print_exc()
        print(f'error: the run was stopped by {sentence(error)}', file=sys.stderr)
    finally:
        distributed = torch_dist.is_available() and torch_dist.is_initialized()
        if distributed:
            torch_dist.destroy_process_group()
    if distributed:
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> NoReturn:
    """End the process without tearing the interpreter down.

    Threads of the process group may still hold tensors when the interpreter
    goes away under them, and abort the process after its work is done.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
