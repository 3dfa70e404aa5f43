# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""From command-line arguments to a Runner, shared by the tools."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Optional

import torch
import torch.distributed as torch_dist
from mmengine.config import Config, ConfigDict
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from fgc_mm.datasets import BrokenDataError, check_dataset_paths, ensure_demo_data
from fgc_mm.registration import find_config

from .cfg_options import CfgOptions, merge_options
from .checkpoint_file import checkpoint_fault
from .cpu_processes import prepare_distributed
from .finite_hook import FiniteHook, NonFiniteError
from .gate_loss_hook import SetupError
from .guard import KeptConfig, guard
from .mistakes import RunError, UsageError, explained, sentence
from .places import check_file, check_folder
from .resume_point import go_on
from .run_settings import check_run_settings
from .safe_checkpoint_hook import DISK_FULL, CheckpointError
from .safe_loading import FLAG, CheckpointFileError, guarded_loading, trust_files
from .start_weights import check_start_weights
from .work_dir_paths import WorkDirHook

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
    add_trust_argument(parser)
    # torch.distributed.launch hands the local rank over as an argument.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)


def config_path(name: str) -> str:
    """The path of a config that may be named as in ``_base_``, with ``package::`` before it."""
    if '::' not in name:
        return name
    try:
        return str(find_config(name))
    except ValueError as error:
        raise UsageError(str(error)) from error


class _Trust(argparse.Action):
    """Effective at once: no tool can forget to look at it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, True)
        trust_files()


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """The way to load checkpoints that could run code, see docs/security.md."""
    parser.add_argument(
        FLAG,
        action=_Trust,
        nargs=0,
        default=False,
        help='load checkpoints as they are, even if that runs code in them',
    )


def read_config(path: str) -> Config:
    """Read a config file.

    Args:
        path (str): Its path, or its name in a package: ``fgc_mm::demo/resnet18_digits_gated.py``.

    Raises:
        UsageError: If the file does not exist or cannot be read as a config.
    """
    path = config_path(path)
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
    args.config = config_path(args.config)
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
    lacking = []
    if 'train' in splits:
        lacking += _what_lacks(prepare_weights, cfg)
    lacking += _what_lacks(prepare_data, cfg, splits)
    if lacking:
        raise UsageError('\n'.join(lacking))
    fill_dataloader_defaults(cfg)
    prepare_distributed(cfg)


def _what_lacks(step: Callable[..., None], *args: Any) -> list[str]:
    """What a step has to complain about: weights and data are told together."""
    try:
        step(*args)
    except UsageError as error:
        return [str(error)]
    return []


def prepare_weights(cfg: Config) -> None:
    """See that the weights a training starts from are there."""
    if cfg.get('resume') and cfg.get('load_from') is None:
        go_on(cfg)
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
    if name == 'SegVisualizationHook':
        hook.update(interval=1)  # that of mmseg 1.2 would draw every 50th batch of a test
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
    guard(runner, kept)
    runner.register_hook(WorkDirHook())
    if not any(isinstance(hook, FiniteHook) for hook in runner.hooks):
        runner.register_hook(FiniteHook())
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
        with guarded_loading(), explained(subject) if subject else contextlib.nullcontext():
            main()
    except (
        UsageError,
        SetupError,
        CheckpointFileError,
        CheckpointError,
        NonFiniteError,
    ) as error:
        code = 2
        if int(os.environ.get('RANK', 0)) == 0 or isinstance(error, RunError):
            print(f'error: {error}', file=sys.stderr)
    except BrokenDataError as error:  # met by one rank only; out of a worker with a traceback
        code = 2
        print(
            f'error: {re.split("Broken[a-zA-Z]+Error: ", str(error))[-1].strip()}', file=sys.stderr
        )
    except Exception as error:
        if _lost_another(error) and not os.environ.get('FGC_MM_TRACEBACK'):
            print(
                'error: another process of this training has ended or does not answer any more '
                f'({error}). If it has said why, mend that; then go on with --resume',
                file=sys.stderr,
            )
            _leave(1)  # nothing is left to agree upon with the others
        code = 1  # in the middle of a run: where matters, too
        traceback.print_exc()
        print(f'error: the run was stopped by {sentence(error)}', file=sys.stderr)
    finally:
        distributed = torch_dist.is_available() and torch_dist.is_initialized()
        if distributed:
            torch_dist.destroy_process_group()
    if distributed:
        _leave(code)
    sys.exit(code)


def _lost_another(error: Exception) -> bool:
    """Whether the process group has broken down, as gloo and NCCL put it."""
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        return False
    signs = ('closed by peer', 'reset by peer', 'Broken pipe', 'imed out', 'imeout', 'NCCL error')
    return any(sign in str(error) for sign in signs)


def _leave(code: int) -> NoReturn:
    """End the process without tearing the interpreter down.

    Threads of the process group may still hold tensors when the interpreter
    goes away under them, and abort the process after its work is done.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
