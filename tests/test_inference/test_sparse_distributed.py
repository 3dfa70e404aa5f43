# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sparse execution under DistributedDataParallel (gloo)."""

import sys

import torch
from sparse_networks import assert_equal_outputs, build, pictures
from torch.nn.parallel import DistributedDataParallel
from two_processes import results_of_ranks, run_in_two_processes

from fgc_mm.inference import enable_sparse


def rank(folder):
    """Evaluate the pictures of this rank, sparsely, before and after a step of training."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo')
    number = torch.distributed.get_rank()
    model = build().train()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    enable_sparse(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x = pictures(4)[number::2]
    with torch.no_grad():
        wrapped.eval()(x)  # prepares weights that are changed now
    sum(out.square().mean() for out in wrapped.train()(x)).backward()
    optimizer.step()
    wrapped.eval()
    with torch.no_grad():
        outs = wrapped(x)  # statistics come from the first rank
        runs = [block.runner is not None for block in model.modules() if hasattr(block, 'runner')]
    state = {key: value.detach() for key, value in model.state_dict().items()}
    torch.save(dict(outs=outs, state=state, runs=runs), f'{folder}/{number}.pth')
    torch.distributed.destroy_process_group()


def test_ranks_compute_what_one_masked_process_does(tmp_path):
    done = run_in_two_processes(__file__, tmp_path)
    ranks = results_of_ranks(done, tmp_path / '{}.pth', weights_only=False)
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


if __name__ == '__main__':
    rank(sys.argv[1])
