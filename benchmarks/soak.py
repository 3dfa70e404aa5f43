# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Whether a long training keeps its memory, files, threads and processes.

Trains the demo classifier, pictures of 32 pixels, with everything on: coupling, batch shaping, a
budget, counted MACs, averaged weights, workers, validations, checkpoints of which two are kept, and
every 50 iterations a batch with NaN that is skipped. The first quarter is for warming up; over the
rest memory may grow by less than 2 % (the log itself grows: mmengine keeps every figure of a run),
and nothing else may grow at all.

    python benchmarks/soak.py                 # 2,000 iterations, about 6 minutes of one core
    python benchmarks/soak.py --iters 400     # a shorter one
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.hooks import Hook

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.cli.run import run as run_command
from fgc_mm.files import write_files
from fgc_mm.runtime import FiniteHook, launch

ROOT = Path(__file__).parents[1]
PER_EPOCH, BATCH = 25, 8
COLUMNS = (
    'iteration', 'rss_MiB', 'used_MiB', 'files', 'threads', 'children', 'tensors', 'pth_files',
)  # fmt: skip


def used() -> float:
    """MiB that somebody has asked the C library for and not given back, 0 where it does not tell.

    What the process holds beyond that is free: pieces between others that are not.
    """
    names = ('arena', 'ordblks', 'smblks', 'hblks', 'hblkhd', 'usmblks', 'fsmblks', 'uordblks')
    fields = [(name, ctypes.c_size_t) for name in (*names, 'fordblks', 'keepcost')]
    info = getattr(ctypes.CDLL(None), 'mallinfo2', None)  # glibc 2.33
    if info is None:
        return 0.0
    info.restype = type('Info', (ctypes.Structure,), dict(_fields_=fields))
    found = info()
    return (found.uordblks + found.hblkhd) / 2**20


class Measure(Hook):
    """Writes down what the process holds."""

    priority = 'LOWEST'

    def __init__(self, every: int) -> None:
        self.every = every
        self.rows: list[dict[str, float]] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if (runner.iter + 1) % 50 == 0:
            data_batch['inputs'] = [picture.float() for picture in data_batch['inputs']]
            data_batch['inputs'][0][0, 0, 0] = math.nan

    def before_train_epoch(self, runner: Any) -> None:
        # Here the workers of the last epoch and a validation are gone.
        if runner.iter and runner.iter % self.every == 0:
            self.rows.append(self.measure(runner))

    def measure(self, runner: Any) -> dict[str, float]:
        gc.collect()
        status = Path('/proc/self/status').read_text().splitlines()
        numbers = {line.split(':')[0]: line.split()[1] for line in status if line.split()[1:]}
        children = Path(f'/proc/self/task/{os.getpid()}/children').read_text().split()
        tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        saved = [name for name in os.listdir(runner.work_dir) if name.endswith('.pth')]
        values = (
            runner.iter, int(numbers['VmRSS']) / 1024, used(), len(os.listdir('/proc/self/fd')),
            int(numbers['Threads']), len(children), tensors, len(saved),
        )  # fmt: skip
        return dict(zip(COLUMNS, values, strict=True))


def build_config(iters: int, work_dir: str) -> Config:
    cfg = Config.fromfile(ROOT / 'configs' / 'demo' / 'resnet18_digits_fgc.py')
    epochs = iters // PER_EPOCH
    cfg.merge_from_dict(
        {
            'work_dir': work_dir,
            'launcher': 'none',
            'train_cfg': dict(max_epochs=epochs, val_interval=4),
            'train_dataloader.batch_size': BATCH,
            'train_dataloader.dataset.indices': PER_EPOCH * BATCH,
            'train_dataloader.num_workers': 1,
            'train_dataloader.persistent_workers': False,
            'val_dataloader.dataset.indices': 32,
            'default_hooks.checkpoint': dict(
                type='CheckpointHook', interval=4, max_keep_ckpts=2, save_best='auto'
            ),
            'default_hooks.logger.interval': 25,
            'randomness': dict(seed=0),
        }
    )
    cfg.custom_hooks = [
        dict(type='FGCHook', layers='last_stage', k=20),
        dict(type='BatchShapingHook', zeta=0.02, history=4),
        dict(type='BudgetHook', target=0.5, cap=0.8),
        dict(type='GatedMACsHook'),
        dict(type='EMAHook'),
        dict(type='FiniteHook', action='skip'),
    ]
    return cfg


def grown(rows: list[dict[str, float]], column: str) -> float:
    """Growth over the last three quarters, by a line through all of them."""
    rest = rows[len(rows) // 4 :]
    steps = [row['iteration'] for row in rest]
    slope = float(np.polyfit(steps, [row[column] for row in rest], 1)[0])
    return slope * (steps[-1] - steps[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--iters', type=int, default=2000)
    parser.add_argument('--every', type=int, default=100, help='iterations between measurements')
    parser.add_argument('--out', help='JSON file for the measurements')
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as work_dir:
        cfg = build_config(args.iters, work_dir)
        launch.prepare(cfg, splits=('train', 'val'))
        runner = launch.build_runner(cfg)
        measure = Measure(args.every)
        runner.register_hook(measure)
        runner.train()
        measure.rows.append(measure.measure(runner))
    finite = next(hook for hook in runner.hooks if isinstance(hook, FiniteHook))
    print(''.join(f'{name:>11}' for name in COLUMNS))
    for row in measure.rows:
        print(''.join(f'{row[name]:>11.1f}' for name in COLUMNS))
    growth = {name: grown(measure.rows, name) for name in COLUMNS[1:]}
    share = growth['rss_MiB'] / measure.rows[-1]['rss_MiB']
    print('\ngrowth of the last three quarters: ', {k: round(v, 2) for k, v in growth.items()})
    print(f'memory: {100 * share:+.2f} %; {finite.skipped} batches were skipped')
    if args.out:
        write_files({args.out: json.dumps(measure.rows, indent=1) + '\n'})
    worse = [name for name in COLUMNS[3:] if growth[name] > 1]
    if share > 0.02:
        worse.insert(0, 'rss_MiB')
    if growth['used_MiB'] > 0.02 * measure.rows[-1]['rss_MiB']:
        worse.insert(0, 'used_MiB')
    if worse:
        raise SystemExit(f'grown: {", ".join(worse)}')
    print('flat')


if __name__ == '__main__':
    run_command(main)
