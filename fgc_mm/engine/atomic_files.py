# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Files that are there as a whole or not at all, whenever the process is killed."""

from __future__ import annotations

import contextlib
import os
import shutil

PARTIAL = '.partial'
"""Ending of a file that is still being written. No checkpoint has it."""


def partial_path(path: str) -> str:
    """Where a file is written before it gets its name: ``epoch_3.pth.partial``."""
    return path + PARTIAL


def sync_file(path: str) -> None:
    """Wait until the content of a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(partial: str, path: str) -> None:
    """Give a complete file its name, in place of what had that name before.

    Args:
        partial (str): The file, its content already on the disk.
        path (str): The name, in any folder of the same file system.
    """
    os.replace(partial, path)
    if hasattr(os, 'O_DIRECTORY'):  # the new name, too, has to reach the disk
        sync_file(os.path.dirname(os.path.abspath(path)))


def discard(path: str) -> None:
    """Remove a file or a folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def remove_partials(folder: str) -> list[str]:
    """Remove what a killed training was writing.

    Args:
        folder (str): Where its checkpoints are.

    Returns:
        list[str]: What there was.
    """
    if not os.path.isdir(folder):
        return []
    endings = ('.pth' + PARTIAL, 'last_checkpoint' + PARTIAL)
    left = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(endings)]
    for path in left:
        discard(path)
    return left
