# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The file beside a checkpoint that holds the banks of Feature-Gate Coupling."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Optional

import torch

from ...errors import CheckpointError
from ...files import partial_path, put_in_place
from ...runtime.companions import companion_path
from ...runtime.work_dir_paths import is_inside


def banks_path(checkpoint: str) -> str:
    """``epoch_3.pth`` -> ``epoch_3.banks.pth``."""
    return companion_path(checkpoint, 'banks')


def write_banks(path: str, state: dict[str, Any]) -> None:
    """Write the file and see it reach the disk.

    Args:
        path (str): Where to; a name of its own, see
            :meth:`~fgc_mm.runtime.SafeCheckpointHook.stage`.
        state (dict): Tensors, numbers and strings. Tensors are written as they
            lie, without a copy.
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, 'wb') as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def finish_banks(checkpoint: Optional[str], token: Optional[str]) -> None:
    """Name the banks of a checkpoint that got its own name just before a kill.

    Args:
        checkpoint (str, optional): Path of the checkpoint.
        token (str, optional): What the checkpoint knows its banks by.
    """
    if checkpoint is None or '://' in checkpoint:
        return
    path = banks_path(checkpoint)
    if not os.path.isfile(partial_path(path)):
        return
    with contextlib.suppress(CheckpointError):  # one that is not complete is not of this checkpoint
        if read_banks(partial_path(path)).get('token') == token:
            put_in_place(partial_path(path), path)


def read_banks(path: str) -> dict[str, Any]:
    """Read what :func:`write_banks` wrote, mapped into memory, not copied.

    Raises:
        CheckpointError: If the file is damaged or something else.
    """
    try:
        state = torch.load(path, map_location='cpu', mmap=True, weights_only=True)
    except Exception as error:
        raise CheckpointError(f'{path} cannot be read as a file of banks: {error}') from error
    if not isinstance(state, dict) or 'layers' not in state:
        raise CheckpointError(f'{path} holds no banks')
    return state


def find_banks(recorded: str, checkpoint: Optional[str], folders: list[str]) -> Optional[str]:
    """The file of banks that belongs to a checkpoint.

    Args:
        recorded (str): Path the file was written to, as the checkpoint says; it counts if
            it is where this run writes.
        checkpoint (str, optional): Path of the checkpoint, which may have been
            moved or renamed together with its banks.
        folders (list[str]): Where this run writes.

    Returns:
        str: The path, None if there is no such file.
    """
    places = [recorded] if is_inside(recorded, folders) else []
    if checkpoint is not None and '://' not in checkpoint:
        beside = os.path.join(os.path.dirname(checkpoint), os.path.basename(recorded))
        places = [banks_path(checkpoint), beside, *places]
    return next((place for place in places if os.path.isfile(place)), None)
