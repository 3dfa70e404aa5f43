# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One of two processes is lost: the other ends, soon, and the training goes on with one or two."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from trainings import PROJECT, Trainings

LONG = 'train_cfg.max_epochs=500'


def wait_for(path, seconds=120, ended=lambda: False):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end and not ended(), f'{path} is not there'
        time.sleep(0.01)


def newest(work_dir):
    path = Path((work_dir / 'last_checkpoint').read_text())
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize(
    'lost', [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_is_lost(lost, short_options, tmp_path):
    """Killed, or there but silent; without a launcher that would end the other one."""
    work_dir = tmp_path / 'run'
    with Trainings('resnet18_digits_fgc', short_options, tmp_path) as trainings:
        timeout = 'env_cfg.dist_cfg.timeout=5'
        first, second = trainings.start(work_dir, LONG, timeout, ranks=2)
        wait_for(work_dir / 'last_checkpoint', ended=trainings.ended)
        os.kill(second, lost)
        begin = time.monotonic()
        if lost == signal.SIGKILL:
            assert trainings.result() == (second, -signal.SIGKILL)
        assert trainings.ended(60)
        assert trainings.result() == (first, 1)
        assert time.monotonic() - begin < 60
        if lost == signal.SIGSTOP:
            os.kill(second, signal.SIGKILL)
            trainings.result()
        message = trainings.log(0).strip().splitlines()[-1]
        assert message.startswith('error: another process of this training has ended or does not')
        assert message.endswith('go on with --resume')
        if lost == signal.SIGSTOP:
            return

        # It goes on with one process, then with two again.
        epoch, seen = newest(work_dir)['meta']['epoch'], newest(work_dir)['fgc']['seen']
        assert seen == 16 * epoch
        for ranks, more in ((1, 1), (2, 2)):
            options = [f'train_cfg.max_epochs={epoch + more}']
            children = trainings.start(work_dir, *options, ranks=ranks)
            assert sorted(trainings.result() for _ in children) == [(c, 0) for c in children]
            assert f'resumed epoch: {epoch + more - 1}' in trainings.log()
            assert (
                f'the random states of {3 - ranks} ranks, and there are {ranks}' in trainings.log()
            )
            done = newest(work_dir)
            assert done['meta']['epoch'] == epoch + more
            # batches of 8 of 16 pictures, on each rank
            assert done['meta']['iter'] == (epoch + more) * 2 // ranks
            assert done['fgc']['seen'] == 16 * (epoch + more)


@pytest.mark.slow
def test_a_rank_is_killed_under_the_launcher(short_options, tmp_path):
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = str(probe.getsockname()[1])
    config = 'configs/demo/resnet18_digits.py'
    env = {**os.environ, 'PORT': port, 'PYTHON': sys.executable, 'OMP_NUM_THREADS': '1'}
    env['CUDA_VISIBLE_DEVICES'] = ''
    command = ['tools/dist_train.sh', config, '2', '--work-dir', str(tmp_path), '--resume']
    launched = subprocess.Popen([*command, *short_options(config, LONG)], cwd=PROJECT, env=env)
    wait_for(tmp_path / 'last_checkpoint', ended=lambda: launched.poll() is not None)
    children = Path(f'/proc/{launched.pid}/task/{launched.pid}/children').read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    assert launched.wait(timeout=60) != 0
    epoch = newest(tmp_path)['meta']['epoch']
    options = short_options(config, f'train_cfg.max_epochs={epoch + 1}')
    subprocess.run([*command, *options], cwd=PROJECT, env=env, check=True, timeout=300)
    assert newest(tmp_path)['meta']['epoch'] == epoch + 1
