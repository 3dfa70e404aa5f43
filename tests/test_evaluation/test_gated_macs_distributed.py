# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Two processes under DistributedDataParallel (gloo), against one."""

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fgc_mm.training import batch_shaping

WORKER = Path(__file__).parents[1] / 'helpers/two_processes_worker.py'


def start(work_dir, **env):
    root = str(WORKER.parents[2])
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': root, **env}
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(work_dir)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    work_dir = tmp_path_factory.mktemp('two_processes')
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    common = dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    workers = [start(work_dir, RANK=r, LOCAL_RANK=r, **common) for r in '01']
    try:
        outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output[-3000:]
    runpy.run_path(str(WORKER))['main'](str(work_dir), distributed=False)
    return {
        name: torch.load(work_dir / f'result_{name}.pth', weights_only=False)
        for name in ('ddp_0', 'ddp_1', 'single_0')
    }


def test_five_images_on_two_ranks_count_as_five(results):
    # The sampler pads them to six; the repeated one must not count.
    single, first, second = (results[name] for name in ('single_0', 'ddp_0', 'ddp_1'))
    assert first['figures'] == pytest.approx(single['figures'])
    assert second['figures'] == first['figures']
    assert first['table'] == single['table'] and len(first['table']) == 8
    assert 0 < single['figures']['gates/dynamic'] < 1


def test_batch_shaping_sorts_over_the_ranks(results):
    ranks = [results[name]['kept'] for name in ('ddp_0', 'ddp_1')]
    assert len(ranks[0]) == len(ranks[1]) == 3
    earlier = torch.zeros(0, ranks[0][0][0].size(1))
    for (probs_0, losses_0), (probs_1, losses_1) in zip(*ranks, strict=True):
        assert not torch.equal(probs_0, probs_1)
        both = torch.cat([probs_0, probs_1])
        expected = batch_shaping(both, joint=torch.cat([earlier, both]), start=len(earlier))
        mean = (losses_0['loss_batch_shaping'] + losses_1['loss_batch_shaping']) / 2
        assert mean == pytest.approx(float(expected), rel=1e-5)
        earlier = both  # history=1


def test_epochs_count_the_images_of_all_ranks(results):
    for name in ('ddp_0', 'ddp_1'):
        rho = [losses['loss_l0'] / float(probs.mean()) for probs, losses in results[name]['kept']]
        # Each iteration sees 2 of 8 images.
        assert rho == pytest.approx([0, 0.25, 0.5], abs=1e-5)


def test_the_gradient_of_the_gate_losses_is_synchronized(results):
    first, second = results['ddp_0']['bias'], results['ddp_1']['bias']
    assert torch.equal(first, second) and (first != 0).float().mean() > 0.5
