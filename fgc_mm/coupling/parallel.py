# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Layers side by side on the cores of a CPU.

Large parts of a layer's step are short operations, some of them on one core: two
layers on one core each are done sooner than one after the other on both.
"""

from __future__ import annotations

import os
import threading
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
    """``[function(item) for item in items]``, on a CPU in threads, among which those of torch are
    divided.

    Autocast and grad mode are those of a new thread. A graph must not be carried out of it:
    backward would visit it in an order that depends on which thread came first, and sums of
    gradients would differ in their last bits from run to run. No two calls may write to the same
    object.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(items))
    if device.type != 'cpu' or workers < 2:
        return [function(item) for item in items]
    pool = _pool(workers, threads // workers, os.getpid())
    # Workers that have just started have set it for all threads to come.
    torch.set_num_threads(threads)
    return list(pool.map(function, items))


@lru_cache(maxsize=1)
def _pool(workers: int, threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that stay, for a process: those of its parent do not survive a fork."""
    del process
    pool = ThreadPoolExecutor(workers, 'fgc_layer', _start, (threads,))
    # All start now: none is left to change torch's default later.
    barrier = threading.Barrier(workers)
    list(pool.map(lambda _: barrier.wait(), range(workers)))
    return pool


def _start(threads: int) -> None:
    torch.set_num_threads(threads)
    # A thread takes torch's default over when it first asks: now, not after the next change.
    torch.get_num_threads()
