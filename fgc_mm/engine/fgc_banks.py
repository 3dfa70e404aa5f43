# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The file beside a checkpoint that holds the banks of Feature-Gate Coupling."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Optional

import torch

from .work_dir_paths import is_inside

_ENDING = '.banks.pth'


def banks_path(checkpoint: str) -> str:
    """``epoch_3.pth`` -> ``epoch_3.banks.pth``."""
    return os.path.splitext(checkpoint)[0] + _ENDING


def write_banks(path: str, state: dict[str, Any]) -> None:
    """Write the file as a whole or not at all.

    Args:
        path (str): Where to.
        state (dict): Tensors, numbers and strings. Tensors are written as they
            lie, without a copy.
    """
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    temporary = f'{path}.{os.getpid()}.tmp'
    try:
        with open(temporary, 'wb') as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
    if hasattr(os, 'O_DIRECTORY'):  # the new name, too, has to reach the disk
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_banks(path: str) -> dict[str, Any]:
    """Read what :func:`write_banks` wrote, mapped into memory, not copied.

    Raises:
        ValueError: If the file is damaged or something else.
    """
    try:
        state = torch.load(path, map_location='cpu', mmap=True, weights_only=True)
    except Exception as error:
        raise ValueError(f'{path} cannot be read as a file of banks: {error}') from error
    if not isinstance(state, dict) or 'layers' not in state:
        raise ValueError(f'{path} holds no banks')
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


def own_banks(paths: Any, folders: list[str]) -> list[str]:
    """Of what a checkpoint lists as files of banks, those that can be ones of this run.

    Args:
        paths (Any): What the checkpoint says.
        folders (list[str]): Where this run writes.
    """
    listed = paths if isinstance(paths, (list, tuple)) else []
    return [path for path in listed if is_inside(path, folders) and path.endswith(_ENDING)]


def remove_orphans(paths: Iterable[str]) -> list[str]:
    """Remove files of banks whose checkpoint is gone.

    Args:
        paths (Iterable[str]): Files this training has written.

    Returns:
        list[str]: Those that are still there.
    """
    kept = []
    for path in paths:
        if not path.endswith(_ENDING):
            continue
        checkpoint = path[: -len(_ENDING)] + '.pth'
        if os.path.exists(checkpoint):
            kept.append(path)
        elif os.path.isfile(path):
            os.remove(path)
    return kept
