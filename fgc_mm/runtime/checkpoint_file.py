# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Telling files that cannot be checkpoints by their outside, before anything is loaded."""

from __future__ import annotations

import os
import zipfile
from typing import Optional

_ZIP = b'PK\x03\x04'
_PICKLE = b'\x80'  # what every pickle since protocol 2 begins with


def checkpoint_fault(path: str) -> Optional[str]:
    """What is wrong with a checkpoint file, as far as its bytes tell without unpickling.

    Args:
        path (str): A file on a local disk.

    Returns:
        str: The message; None if it may be a checkpoint.
    """
    reason = _reason(path)
    return None if reason is None else f'{path} cannot be read as a checkpoint: {reason}'


def _reason(path: str) -> Optional[str]:
    if os.path.isdir(path):
        return 'it is a folder; name the .pth file in it'
    size = os.path.getsize(path)
    if not size:
        return 'it is empty (0 bytes); take an earlier one, or fetch it again'
    with open(path, 'rb') as file:
        start = file.read(4)
    if start == _ZIP:
        return _zip_reason(path, size)
    if start.startswith(_PICKLE) or _is_tar(path):  # what PyTorch wrote before 1.6
        return None
    return f'its {size} bytes are not what torch.save writes; name the .pth file of a training'


def _zip_reason(path: str, size: int) -> Optional[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return (
            f'it is cut short or damaged (its {size} bytes have no end of an archive); take an '
            'earlier one, or fetch it again'
        )
    if any(name.endswith('/data.pkl') or name == 'data.pkl' for name in names):
        return None
    return (
        f'it is a zip archive of something else (it holds {", ".join(names[:2]) or "nothing"}); '
        'name the .pth file of a training'
    )


def _is_tar(path: str) -> bool:
    with open(path, 'rb') as file:
        file.seek(257)
        return file.read(5) == b'ustar'
