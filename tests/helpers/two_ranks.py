# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""tools/train.py in two processes."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def train_on_two_ranks(cfg, folder, timeout=600):
    """Train a config in two processes, its own modules in a folder, into ``run`` there."""
    cfg.dump(str(folder / 'cfg.py'))
    env = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join((str(REPOSITORY), str(folder))),
        'OMP_NUM_THREADS': '1',
        'CUDA_VISIBLE_DEVICES': '',
    }
    command = [
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2',
        'tools/train.py', str(folder / 'cfg.py'), '--launcher', 'pytorch',
        '--work-dir', str(folder / 'run'),
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=timeout
    )
