# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Layouts of feature maps, and their memory between two passes."""

from __future__ import annotations

import ctypes
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from typing import Optional

import cv2
import numpy as np
import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)


def keep_memory(megabytes: int = 1024) -> bool:
    """Let the process keep the memory of feature maps it has freed.

    By default glibc gives large blocks back to the system at once, and the next
    pass pays for every page anew: for a map of 16 MB that takes longer than many a
    convolution. It concerns the whole process, so programs call it, not
    libraries: ``SparseInferenceHook`` does before a test on a CPU (not before a
    validation: trainings keep the system's way), ``benchmarks/speed.py`` does too.

    Args:
        megabytes (int): How much free memory to keep at most. Defaults to 1024.

    Returns:
        bool: Whether it is so now; always False without glibc.
    """
    if platform.libc_ver()[0] != 'glibc':
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # The order: no block is mapped on its own, then freed ones stay.
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, megabytes << 20))


def to_contiguous(maps: Tensor) -> Tensor:
    """B x C x H x W in the usual layout. PyTorch goes through channels-last maps column by column,
    and on a CPU each step is a cache line; OpenCV does it in blocks, in half the time."""
    suits = (
        maps.device.type == 'cpu'
        and maps.dtype == torch.float32
        and not maps.requires_grad
        and maps.numel() > 0
        and maps.is_contiguous(memory_format=torch.channels_last)
    )
    if maps.is_contiguous() or not suits:
        return maps.contiguous()
    out = torch.empty(maps.shape, dtype=maps.dtype, device=maps.device)
    for image, target in zip(
        maps.permute(0, 2, 3, 1).flatten(1, 2).numpy(), out.flatten(2).numpy(), strict=True
    ):
        _transpose(image, target)
    return out


_MANY = 1 << 22
"""Values of an image that are worth a second thread."""
_helper: Optional[ThreadPoolExecutor] = None


def _forget_thread() -> None:
    """Threads do not come along into a forked process."""
    global _helper
    _helper = None


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_forget_thread)


def _transpose(image: np.ndarray, target: np.ndarray) -> None:
    """Positions x channels as channels x positions, half of the channels each in two threads."""
    half = image.shape[1] // 2
    if image.size < _MANY or half == 0 or torch.get_num_threads() < 2:
        cv2.transpose(image, dst=target)
        return
    global _helper
    _helper = _helper or ThreadPoolExecutor(1, 'fgc_mm_transpose')
    other = _helper.submit(cv2.transpose, image[:, :half], target[:half])
    cv2.transpose(image[:, half:], dst=target[half:])
    other.result()
