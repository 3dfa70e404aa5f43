# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Files that belong to a checkpoint and lie beside it: ``epoch_3.banks.pth`` of ``epoch_3.pth``."""

from __future__ import annotations

import glob
import os

_SUFFIX = '.pth'


def companion_path(checkpoint: str, name: str) -> str:
    """Where a companion of a checkpoint lies.

    Args:
        checkpoint (str): Path of the checkpoint, such as ``epoch_3.pth``.
        name (str): What it is called, such as ``'banks'``.

    Returns:
        str: ``epoch_3.banks.pth``.
    """
    return f'{os.path.splitext(checkpoint)[0]}.{name}{_SUFFIX}'


def companions_of(checkpoint: str) -> list[str]:
    """The companions that are there.

    Args:
        checkpoint (str): Path of the checkpoint, on a local disk.
    """
    return sorted(glob.glob(companion_path(glob.escape(checkpoint), '*')))


def is_companion(path: str) -> bool:
    """Whether a file is, by its name, the companion of a checkpoint and not one itself."""
    stem = os.path.basename(path)[: -len(_SUFFIX)]
    return path.endswith(_SUFFIX) and os.path.isfile(
        os.path.join(os.path.dirname(path), stem.rpartition('.')[0] + _SUFFIX)
    )
