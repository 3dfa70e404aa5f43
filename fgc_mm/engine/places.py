# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Whether results can be written where they are to go, asked before they are computed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Union

from .mistakes import UsageError


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
