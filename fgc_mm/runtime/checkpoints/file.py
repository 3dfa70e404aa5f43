# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What the bytes of a checkpoint file tell, before anything in it is unpickled."""

from __future__ import annotations

import os
import tarfile
import zipfile
import zlib
from typing import BinaryIO, Optional

from ...errors import UsageError

_ZIP = b'PK\x03\x04'
_PICKLE = b'\x80'  # what every pickle since protocol 2 begins with
_PICKLED = 'data.pkl'
_BROKEN = (zipfile.BadZipFile, zlib.error, OSError, ValueError, NotImplementedError, EOFError)
# As torch.save pickles a string: its length, then its letters.
_OF_A_TRAINING = (b'\x0b\0\0\0message_hub', b'\x09\0\0\0optimizer')


def checkpoint_fault(path: str) -> Optional[str]:
    """What is wrong with a local checkpoint file, and what to do; None if it may be one."""
    reason = file_fault(path)
    if reason is None:
        return None
    advice = 'name the .pth file of a training'
    if reason.startswith(('it is empty', 'it is cut')):
        advice = 'take an earlier one, or fetch it again'
    return f'{path} cannot be read as a checkpoint: {reason}; {advice}'


def existing(checkpoint: str) -> str:
    """The path of a checkpoint that is there and may be one; addresses are taken as they are."""
    if '://' in checkpoint:
        return checkpoint
    if not os.path.exists(checkpoint):
        raise UsageError(f'checkpoint {checkpoint} does not exist')
    fault = checkpoint_fault(checkpoint)
    if fault is not None:
        raise UsageError(fault)
    return checkpoint


def file_fault(path: str, whole: bool = False) -> Optional[str]:
    """What is wrong with a file of ``torch.save``; ``whole`` reads all of it and its checksums."""
    if os.path.isdir(path):
        return 'it is a folder'
    size = os.path.getsize(path)
    if not size:
        return 'it is empty (0 bytes)'
    with open(path, 'rb') as file:
        start = file.read(len(_ZIP))
    if start != _ZIP:  # what PyTorch wrote before 1.6
        known = start.startswith(_PICKLE) or tarfile.is_tarfile(path)
        return None if known else f'its {size} bytes are not what torch.save writes'
    try:
        with zipfile.ZipFile(path) as archive:
            names, damaged = archive.namelist(), archive.testzip() if whole else None
    except _BROKEN:
        return f'it is cut short or damaged (its {size} bytes have no end of an archive)'
    if damaged is not None:
        return f'it is cut short or damaged ({damaged} in it has another checksum)'
    if not any(_last(name) == _PICKLED for name in names):
        held = ', '.join(names[:2]) or 'nothing'
        return f'it is a zip archive of something else (it holds {held})'
    return None


def is_of_a_training(path: str) -> Optional[bool]:
    """Whether a file has the keys of a training that can be gone on from; None if it is too broken
    to tell.

    What lies beside a checkpoint, best and published ones and plain weights lack one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (name for name in archive.namelist() if _last(name) == _PICKLED)
            content = archive.read(pickled)
    except _BROKEN:
        return None
    return all(key in content for key in _OF_A_TRAINING)


def unusual_format(file: BinaryIO) -> Optional[str]:
    """What a file is that torch loads in a way of its own; None if it is not."""
    start = file.tell()
    try:
        if tarfile.is_tarfile(file):
            return 'a tar archive of an early PyTorch'
        file.seek(start)
        with zipfile.ZipFile(file) as archive:
            if any(_last(name) == 'constants.pkl' for name in archive.namelist()):
                return 'a TorchScript program'
    except (zipfile.BadZipFile, OSError):
        pass  # of the other format, or damaged: torch says which
    finally:
        file.seek(start)
    return None


def _last(name: str) -> str:
    return name.rpartition('/')[2]
