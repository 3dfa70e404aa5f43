# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sparse execution under DistributedDataParallel (gloo)."""

import pytest
import torch
from sparse_networks import assert_equal_outputs, build, pictures
from sparse_rank import rank
from torch.multiprocessing import get_context


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp('ranks')
    files = [str(folder / f'{number}.pth') for number in (0, 1)]
    start = get_context('spawn')
    workers = [
        start.Process(target=rank, args=(number, folder / 'store', files[number]))
        for number in (0, 1)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        assert worker.exitcode == 0
    return [torch.load(file, weights_only=False) for file in files]


def test_ranks_compute_what_one_masked_process_does(ranks):
    masked = build()
    first, second = (result['state'] for result in ranks)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key  # gradients and statistics were shared
    assert any((value != masked.state_dict()[key]).any() for key, value in first.items())
    for number, result in enumerate(ranks):
        assert result['runs'] and all(result['runs'])
        masked.load_state_dict(result['state'])
        with torch.no_grad():
            assert_equal_outputs(result['outs'], masked(pictures(4)[number::2]))
