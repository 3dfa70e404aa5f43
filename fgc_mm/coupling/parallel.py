# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Layers side by side on the cores of a CPU.

Large parts of a layer's step are short operations, some of them on one core.
Two layers on one core each take three quarters of the time of two layers that
follow each other on both (``benchmarks/fgc.py --step``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

Item = TypeVar('Item')
Result = TypeVar('Result')


def map_layers(
    function: Callable[[Item], Result], items: Sequence[Item], device: torch.device
) -> list[Result]:
    """``[function(item) for item in items]``, on a CPU in threads.

    The threads of torch are divided among them. Gradients may be taken of what
    is returned. Autocast and grad mode are those of a new thread.

    Args:
        function (Callable): Called once for each item, in no fixed order; two
            calls must not write to the same object.
        items (Sequence): Its arguments.
        device (torch.device): Where the work is done. Only a CPU gains.

    Returns:
        list: The results in the order of the items.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(items))
    if device.type != 'cpu' or workers < 2:
        return [function(item) for item in items]
    pool = _pool(workers, threads // workers, os.getpid())
    try:
        return list(pool.map(function, items))
    finally:
        # Workers that have just started set it for all threads to come.
        torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def _pool(workers: int, threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that stay, for a process: those of its parent do not survive a fork."""
    del process
    return ThreadPoolExecutor(workers, 'fgc_layer', torch.set_num_threads, (threads,))
