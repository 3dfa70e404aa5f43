# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One rank of test_sparse_distributed.py."""

import torch
from sparse_networks import build, pictures
from torch.nn.parallel import DistributedDataParallel

from fgc_mm.inference import enable_sparse


def rank(number, store, results):
    """Evaluate the pictures of this rank, sparsely, before and after a step of training."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{store}', rank=number, world_size=2
    )
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
    torch.save(dict(outs=outs, state=state, runs=runs), results)
    torch.distributed.destroy_process_group()
