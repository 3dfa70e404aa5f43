# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Two processes that talk through gloo."""

import os
import subprocess
import sys
from pathlib import Path

import torch

PROJECT = Path(__file__).parents[2]


def run_in_two_processes(script, *args, folder=None, timeout=600):
    """Run a script on two ranks, with the helpers and the modules of a folder at hand."""
    found = [PROJECT, PROJECT / 'tests/helpers', *([] if folder is None else [folder])]
    env = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join(map(str, found)),
        'OMP_NUM_THREADS': '1',
        'CUDA_VISIBLE_DEVICES': '',
    }
    command = [
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2',
        *map(str, (script, *args)),
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=timeout
    )


def train_in_two_processes(cfg, folder, *options, work_dir='run', timeout=600):
    """Train a config, its own modules in a folder, into a work dir there."""
    cfg.dump(str(folder / 'cfg.py'))
    args = [folder / 'cfg.py', '--launcher', 'pytorch', '--work-dir', folder / work_dir, *options]
    return run_in_two_processes('tools/train.py', *args, folder=folder, timeout=timeout)


def results_of_ranks(done, pattern, **loading):
    """What both ranks have saved, after they ended well."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    files = [str(pattern).format(rank) for rank in (0, 1)]
    return [torch.load(file, **{'weights_only': True, **loading}) for file in files]
