# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Files that belong to a checkpoint and lie beside it: ``epoch_3.NAME.pth`` of ``epoch_3.pth``.

A hook writes one by :meth:`~fgc_mm.runtime.SafeCheckpointHook.add_companion`, which keeps it
with its checkpoint from then on, and reads it back by :func:`find_companion` and
:func:`read_companion`. The token that is in both tells whether they belong together.
"""

from __future__ import annotations

import contextlib
import glob
import os
from typing import Any, Optional

import torch
from mmengine.dist import barrier, is_main_process

from ...errors import CheckpointError
from ...files import finish, partial_path
from .work_dir_paths import is_inside


def companion_path(checkpoint: str, name: str) -> str:
    """Where a companion of a checkpoint lies."""
    return f'{os.path.splitext(checkpoint)[0]}.{name}.pth'


def companions_of(checkpoint: str) -> list[str]:
    """The companions that are there."""
    return sorted(glob.glob(companion_path(glob.escape(checkpoint), '*')))


def is_companion(path: str) -> bool:
    """Whether a file is, by its name, the companion of a checkpoint and not one itself."""
    stem, ending = os.path.splitext(path)
    checkpoint, name = os.path.splitext(stem)
    return ending == '.pth' and bool(name) and os.path.isfile(checkpoint + '.pth')


def find_companion(
    name: str, recorded: str, token: str, checkpoint: Optional[str], folders: list[str]
) -> Optional[str]:
    """The companion of a checkpoint; to be called on all ranks.

    Args:
        name (str): What it is called.
        recorded (str): Path it was written to, as the checkpoint says; it counts if it is where
            this run writes.
        token (str): What the checkpoint knows it by.
        checkpoint (str, optional): Path of the checkpoint, which may have been moved or renamed
            together with its companion.
        folders (list[str]): Where this run writes.

    Returns:
        str: The path, None if there is no such file.
    """
    places = []
    if checkpoint is not None and '://' not in checkpoint:
        named = companion_path(checkpoint, name)
        if is_main_process():
            _finish(named, token)
        places = [named, os.path.join(os.path.dirname(checkpoint), os.path.basename(recorded))]
    if is_inside(recorded, folders):
        places.append(recorded)
    barrier()
    return next((place for place in places if os.path.isfile(place)), None)


def _finish(path: str, token: str) -> None:
    """Name a companion whose checkpoint got its own name just before a kill."""
    with contextlib.suppress(CheckpointError):  # there is none, or none that is complete
        if read_companion(partial_path(path))['token'] == token:
            finish(path)


def read_companion(path: str) -> dict[str, Any]:
    """Read a companion, mapped into memory, not copied."""
    try:
        content = torch.load(path, map_location='cpu', mmap=True, weights_only=True)
    except Exception as error:
        raise CheckpointError(f'{path}, of a checkpoint, cannot be read: {error}') from error
    if not isinstance(content, dict) or 'token' not in content:
        raise CheckpointError(f'{path} is nothing that belongs to a checkpoint: it has no token')
    return content
