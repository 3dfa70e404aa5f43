# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Layouts of feature maps, and their memory between two passes."""

from __future__ import annotations

import ctypes
import platform

import cv2
import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)


def keep_memory(megabytes: int = 1024) -> bool:
    """Let the process keep the memory of feature maps it has freed.

    By default glibc gives large blocks back to the system at once, and the next
    pass pays for every page anew: for a map of 16 MB that takes longer than many a
    convolution. It concerns the whole process, so programs call it, not
    libraries: the tools of this project do where they run sparsely.

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
    """A tensor in the usual layout, soon.

    PyTorch goes through channels-last maps column by column, and on a CPU each step
    is a cache line. OpenCV does it in blocks, in half the time.

    Args:
        maps (Tensor): B x C x H x W.
    """
    suits = (
        maps.device.type == 'cpu'
        and maps.dtype == torch.float32
        and not maps.requires_grad
        and maps.numel() > 0
        and maps.is_contiguous(memory_format=torch.channels_last)
    )
    if maps.is_contiguous() or not suits:
        return maps.contiguous()
    out = torch.empty(maps.shape)
    for image, target in zip(
        maps.permute(0, 2, 3, 1).flatten(1, 2).numpy(), out.flatten(2).numpy(), strict=True
    ):
        cv2.transpose(image, dst=target)
    return out
