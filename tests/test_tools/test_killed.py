# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Trainings that are killed again and again end like one that was left alone, bit for bit."""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fgc_mm.engine.fgc_banks import read_banks
from fgc_mm.engine.resume_point import what_is_wrong

PROJECT = Path(__file__).parents[2]
# config -> package, how it is cut short
TASKS = {
    'resnet18_digits_fgc': (
        'mmpretrain',
        [
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
    """Starts trainings of one config, and kills them."""

    def __init__(self, name, options, folder):
        self.folder = folder
        package, cut = TASKS[name]
        config = f'configs/demo/{name}.py'
        self.arguments = [config, *options(config, *CUT, *cut)]
        server = [sys.executable, str(PROJECT / 'tests/test_tools/fork_trainings.py'), package]
        env = {**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
        self.server = subprocess.Popen(
            server, cwd=PROJECT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def close(self):
        self.server.stdin.close()
        self.server.wait(60)

    def run(self, work_dir, moment=None):
        """One training, resumed if there is something to resume.

        Returns:
            tuple: Whether it came to its end, and how long it took.
        """
        begin = time.monotonic()
        log = self.folder / 'output.log'
        args = [self.arguments[0], '--work-dir', str(work_dir), '--resume', *self.arguments[1:]]
        self.server.stdin.write(f'{json.dumps([args, str(log)])}\n'.encode())
        child = int(self.server.stdout.readline())
        if moment is not None and self.wait(moment, work_dir):
            os.kill(child, signal.SIGKILL)
        status = int(self.server.stdout.readline())
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return False, time.monotonic() - begin
        assert status == 0, log.read_text()[-3000:]
        return True, time.monotonic() - begin

    def wait(self, moment, work_dir):
        """Sleep until the moment; False if the training ends before."""
        seconds, writes = moment
        end, was_writing = time.monotonic() + seconds, False
        while True:
            if select.select([self.server.stdout], [], [], 0)[0]:
                return False
            if writes is None and time.monotonic() > end:
                return True
            if writes is not None:
                writing = work_dir.is_dir() and any(work_dir.glob('*.partial'))
                writes -= writing and not was_writing
                was_writing = writing
                if writes < 0:
                    time.sleep(seconds)
                    return True
            else:
                time.sleep(0.001)


def check(work_dir):
    """All that is called a checkpoint is one; the latest is there, with its banks."""
    checkpoints = [p for p in work_dir.glob('*.pth') if not p.name.endswith('.banks.pth')]
    for path in checkpoints:
        assert what_is_wrong(str(path)) is None
        torch.load(path, weights_only=False)
    last = work_dir / 'last_checkpoint'
    if last.exists():
        assert Path(last.read_text()) in checkpoints
    return len(checkpoints)


def outcome(work_dir):
    """Weights, banks, states and metrics at the end, flat."""
    (path,) = work_dir.glob('epoch_6.pth')
    checkpoint = torch.load(path, weights_only=False)
    for key in ('meta', 'message_hub'):  # of these, times and paths
        del checkpoint[key]
    kept = {'checkpoint': checkpoint}
    if 'fgc' in checkpoint:
        kept['banks'] = read_banks(str(path.with_suffix('.banks.pth')))
        for entry in (checkpoint['fgc'], kept['banks']):
            del entry['token']
        del checkpoint['fgc']['banks']
    scalars = sorted(work_dir.glob('*/vis_data/scalars.json'))[-1].read_text().splitlines()
    metrics = json.loads(scalars[-1])
    kept['metrics'] = {k: v for k, v in metrics.items() if not k.endswith('time')}
    assert kept['metrics']['step'] == 6 and len(kept['metrics']) > 5
    kept['files'] = sorted(p.name for p in work_dir.iterdir() if p.is_file())
    return dict(flat('', kept))


def flat(name, value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(f'{name}/{key}', item)
    elif isinstance(value, (list, tuple)) and not all(isinstance(v, (int, str)) for v in value):
        for number, item in enumerate(value):
            yield from flat(f'{name}/{number}', item)
    else:
        yield name, value


def differences(one, other):
    assert one.keys() == other.keys()
    return [
        key
        for key, value in one.items()
        if not (
            torch.equal(value, other[key])
            if isinstance(value, torch.Tensor)
            else value == other[key]
        )
    ]


def kill_and_compare(name, kills, options, folder, seed=0):
    rng = random.Random(seed)
    trainings = Trainings(name, options, folder)
    try:
        _, seconds = trainings.run(folder / 'alone')
        expected = outcome(folder / 'alone')
        assert len(expected) > 200
        done = writing = lives = 0
        while done < kills:
            lives += 1
            work_dir, ended, there = folder / f'life{lives}', False, 0
            while not ended and done < kills:
                if done % 2:
                    moment = rng.uniform(0, 0.02), rng.choice([0, 0, 1])
                else:
                    moment = rng.uniform(0, seconds), None
                ended, _ = trainings.run(work_dir, moment)
                done += not ended
                writing += not ended and any(work_dir.glob('*.partial'))
                left = check(work_dir)
                assert left >= min(there, 1)
                there = left
            if not ended:
                assert trainings.run(work_dir)[0]
            assert differences(outcome(work_dir), expected) == []
            shutil.rmtree(work_dir)
    finally:
        trainings.close()
    print(f'{name}: {done} kills, {writing} while a checkpoint was written, {lives} trainings')
    return writing


def test_killed_classification(short_options, tmp_path):
    assert kill_and_compare('resnet18_digits_fgc', 4, short_options, tmp_path) > 0


@pytest.mark.slow
@pytest.mark.parametrize('name', TASKS)
def test_killed_often(name, short_options, tmp_path):
    """Eight kills each: 24 over the three tasks."""
    assert kill_and_compare(name, 8, short_options, tmp_path, seed=1) > 0
