# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Writing files: as a whole or not at all, and only where it is possible."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Union

from .errors import UsageError

PARTIAL = '.partial'  # ending of a file that is still being written; no checkpoint has it

Content = Union[str, bytes, memoryview, Callable[[BinaryIO], Any]]


def write_files(files: Mapping[Union[str, Path], Content]) -> None:
    """Write one or more files, as a whole: all of them or none.

    Older files of these names stay as they are until the last byte of the new ones is on the
    disk. Folders are made where they are missing.

    Args:
        files (Mapping): Path -> text, bytes, or a function that writes to the open file, such as
            ``partial(torch.save, weights)``.
    """
    for path in files:
        if os.path.isdir(path):
            raise IsADirectoryError(f'{path} is a folder, a file is to be written there')
    # Another process may be writing the same file.
    with replacing(f'.{os.getpid()}{PARTIAL}') as stage:
        for path, content in files.items():
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            with open(stage(str(path)), 'wb') as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(ending: str = PARTIAL) -> Iterator[Callable[[str], str]]:
    """Files that get their names together, once all are complete and on the disk.

    What is given leads from the name a file shall have to the one to write it under; files are
    renamed in the order of these calls. Before the first has its name, an error removes all.
    """
    paths: list[str] = []

    def stage(path: str) -> str:
        paths.append(path)
        return path + ending

    named = False
    try:
        yield stage
        for path in paths:
            _sync(path + ending)
        for path in paths:
            os.replace(path + ending, path)
            named = True
            _sync_name(path)
    except BaseException:
        for path in () if named else paths:
            discard(path + ending)
        raise


def partial_path(path: str) -> str:
    """Where a checkpoint, or what belongs to it, is written before it gets its name."""
    return path + PARTIAL


def finish(path: str) -> None:
    """Give a file its name that was complete when its writer was killed."""
    os.replace(partial_path(path), path)
    _sync_name(path)


def _sync_name(path: str) -> None:
    if hasattr(os, 'O_DIRECTORY'):  # the new name, too, has to reach the disk
        _sync(os.path.dirname(os.path.abspath(path)))


def _sync(path: str) -> None:
    """Wait until the content of a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: str) -> None:
    """Remove a file or a folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def remove_partials(folder: str) -> list[str]:
    """Remove what a killed training was writing."""
    if not os.path.isdir(folder):
        return []
    endings = ('.pth' + PARTIAL, 'last_checkpoint' + PARTIAL)
    left = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(endings)]
    for path in left:
        discard(path)
    return left


def check_folder(path: Union[str, Path], option: str) -> None:
    """See that a folder can be written to, or made."""
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
    """See that a file can be written."""
    if Path(path).is_dir():
        raise UsageError(f'{option} {path} is a folder; name a file in it')
    if Path(path).exists() and not Path(path).is_file():
        raise UsageError(f'{option} {path} is no regular file and would be replaced by one')
    check_folder(Path(path).parent, option)
