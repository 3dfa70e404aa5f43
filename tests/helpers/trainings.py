# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Starting tools/train.py in processes that can be killed, and comparing what they leave."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from fgc_mm.runtime.checkpoints.companions import read_companion
from fgc_mm.runtime.checkpoints.resume_point import what_is_wrong

PROJECT = Path(__file__).parents[2]
CLASSES = ','.join(str(80 * i) for i in range(16))  # pictures of all digits
# config -> package, how it is cut short
TASKS = {
    'resnet18_digits_fgc': (
        'mmpretrain',
        [
            f'train_dataloader.dataset.indices=[{CLASSES}]',
            'val_dataloader.dataset.indices=100',
            'train_dataloader.batch_size=8',
            'default_hooks.checkpoint.save_best=accuracy/top1',
            'custom_hooks.3.k=5',
        ],
    ),
    'faster_rcnn_r18_digits_gated': ('mmdet', ['train_dataloader.batch_size=4']),
    'pspnet_r18_digits_gated': ('mmseg', ['train_dataloader.batch_size=4', 'load_from=None']),
}
CUT = [
    'train_dataloader.dataset.indices=16',
    'val_dataloader.dataset.indices=4',
    'train_cfg.max_epochs=6',
    'train_cfg.val_interval=2',
]


class Trainings:
    """Trainings of one config, cut short, each in a process of its own or several.

    Args:
        name (str): The config.
        options (Callable): The fixture ``short_options``.
        folder (Path): Where the output goes.
    """

    def __init__(self, name, options, folder):
        self.folder = folder
        self.config = f'configs/demo/{name}.py'
        package, cut = TASKS[name]
        self.options = options(self.config, *CUT, *cut)
        server = [sys.executable, str(PROJECT / 'tests/helpers/fork_trainings.py'), package]
        env = {**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
        self.server = subprocess.Popen(
            server, cwd=PROJECT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stdin.close()
        self.server.wait(60)

    def log(self, rank=0):
        return (self.folder / f'rank{rank}.log').read_text(errors='replace')

    def start(self, work_dir, *more, ranks=1):
        """Start a training, resumed if there is something to resume; its processes."""
        args = [self.config, '--work-dir', str(work_dir), '--resume', *self.options, *more]
        envs = [{} for _ in range(ranks)]
        if ranks > 1:
            with socket.socket() as probe:
                probe.bind(('127.0.0.1', 0))
                port = str(probe.getsockname()[1])
            common = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=port, WORLD_SIZE=str(ranks))
            envs = [dict(common, RANK=str(r), LOCAL_RANK=str(r)) for r in range(ranks)]
            args += ['--launcher', 'pytorch']
        logs = [str(self.folder / f'rank{rank}.log') for rank in range(ranks)]
        request = json.dumps([args, list(zip(envs, logs, strict=True))])
        self.server.stdin.write(f'{request}\n'.encode())
        return json.loads(self.server.stdout.readline())

    def ended(self, timeout=0):
        """Whether one of the processes has ended."""
        return bool(select.select([self.server.stdout], [], [], timeout)[0])

    def result(self):
        """Wait for one to end; its number and its exit code, negative for a signal."""
        child, status = json.loads(self.server.stdout.readline())
        return child, os.waitstatus_to_exitcode(status)

    def run(self, work_dir, moment=None, more=()):
        """One training in one process, up to its end or a moment.

        Returns:
            tuple: Whether it came to its end, and how many seconds it took.
        """
        (child,) = self.start(work_dir, *more)
        begin = time.monotonic()
        if moment is not None and self.wait(moment, work_dir):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(child, signal.SIGKILL)
        _, code = self.result()
        seconds = time.monotonic() - begin
        if code == -signal.SIGKILL:
            return False, seconds
        assert code == 0, self.log()[-3000:]
        return True, seconds

    def wait(self, moment, work_dir):
        """Sleep until the moment: seconds, and after which beginning of a write (None: of the
        training) they count. False if the training ends before."""
        seconds, writes = moment
        end, was_writing = time.monotonic() + seconds, False
        while not self.ended():
            if writes is None:
                if time.monotonic() > end:
                    return True
            else:
                writing = work_dir.is_dir() and any(work_dir.glob('*.partial'))
                writes -= writing and not was_writing
                was_writing = writing
                if writes < 0:
                    time.sleep(seconds)
                    return True
            time.sleep(0.0005)
        return False


def check(work_dir):
    """All that is called a checkpoint is one; the latest is there. How many there are."""
    checkpoints = [p for p in work_dir.glob('*.pth') if not p.name.endswith('.banks.pth')]
    for path in checkpoints:
        assert what_is_wrong(str(path)) is None
        torch.load(path, weights_only=False)
    last = work_dir / 'last_checkpoint'
    if last.exists():
        assert Path(last.read_text()) in checkpoints
    return len(checkpoints)


def outcome(work_dir, epochs=6):
    """Weights, banks, states and metrics at the end, and the names of the files."""
    path = work_dir / f'epoch_{epochs}.pth'
    checkpoint = torch.load(path, weights_only=False)
    for key in ('meta', 'message_hub'):  # of these, times and paths
        del checkpoint[key]
    kept = {'checkpoint': checkpoint}
    if 'fgc' in checkpoint:
        kept['banks'] = read_companion(str(path.with_suffix('.banks.pth')))
        for entry in (checkpoint['fgc'], kept['banks']):
            del entry['token']
        del checkpoint['fgc']['banks']
    scalars = sorted(work_dir.glob('*/vis_data/scalars.json'))[-1].read_text().splitlines()
    metrics = json.loads(scalars[-1])
    kept['metrics'] = {k: v for k, v in metrics.items() if not k.endswith('time')}
    assert kept['metrics']['step'] == epochs and 'loss' not in kept['metrics']
    kept['files'] = ' '.join(sorted(p.name for p in work_dir.iterdir() if p.is_file()))
    flat = dict(_flat('', kept))
    assert len(flat) > 200
    return flat


def _flat(name, value):
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f'{name}/{key}', item)
    else:
        yield name, value


def differences(one, other):
    """The names of what is not the same, bit for bit."""
    assert one.keys() == other.keys()
    same = {
        key: torch.equal(value, other[key])
        if isinstance(value, torch.Tensor)
        else value == other[key]
        for key, value in one.items()
    }
    return [key for key, equal in same.items() if not equal]
