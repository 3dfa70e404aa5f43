# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Writing files: as a whole or not at all, and only where it is possible."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Union

from .errors import UsageError

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


def check_folder(path: Union[str, Path], option: str) -> None:
    """See that a folder can be written to, or made.

    Args:
        path (str | Path): The folder; it need not exist yet.
        option (str): What it was given as, such as '--out-dir'.

    Raises:
        UsageError: If it is, or lies below, a file, or nothing can be written there.
    """
    if not str(path):
        raise UsageError(f'{option} is empty; name a folder')
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        what = 'is' if place == Path(path).absolute() else 'lies below'
        raise UsageError(f'{option} {path} {what} a file; name a folder that can be written to')
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f'{option} {path}: {place} is no folder that can be written to')


def check_file(path: Union[str, Path], option: str) -> None:
    """See that a file can be written.

    Args:
        path (str | Path): The file; its folder need not exist yet.
        option (str): What it was given as, such as '--out'.

    Raises:
        UsageError: If it is a folder or a device, or its folder cannot be.
    """
    if Path(path).is_dir():
        raise UsageError(f'{option} {path} is a folder; name a file in it')
    if Path(path).exists() and not Path(path).is_file():
        raise UsageError(f'{option} {path} is no regular file and would be replaced by one')
    check_folder(Path(path).parent, option)
