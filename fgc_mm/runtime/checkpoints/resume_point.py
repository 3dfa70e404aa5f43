# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The checkpoint ``--resume`` goes on from."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Sequence
from typing import Optional

from mmengine.config import Config
from mmengine.logging import print_log

from ...errors import UsageError
from .companions import companions_of, is_companion
from .file import file_fault, is_of_a_training
from .work_dir_paths import checkpoint_folders, is_inside

_MISSING, _ELSEWHERE = 'does not exist', 'is not in this work dir'


def go_on(cfg: Config, checkpoint: Optional[str] = None) -> None:
    """Have a training go on from a checkpoint, or from the latest one in its work dir.

    Without one to go on from, the config's ``load_from`` still holds.
    """
    if checkpoint is not None:
        problem = None if '://' in checkpoint else what_is_wrong(checkpoint)
        if problem is not None:
            raise UsageError(f'--resume: checkpoint {checkpoint} {problem}')
        cfg.resume, cfg.load_from = True, checkpoint
        return
    hook = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    folders = checkpoint_folders(cfg.work_dir, [hook.get('out_dir')])
    found, notice = find_resume_point(cfg.work_dir, folders)
    if notice is not None:
        print_log(f'--resume: {notice}', 'current', logging.WARNING)
    if found is not None:
        cfg.resume, cfg.load_from = True, found


def what_is_wrong(path: str) -> Optional[str]:
    """Why a local checkpoint, or what lies beside it, cannot be gone on from; None if it can."""
    if os.path.isdir(path):  # as written by deepspeed
        return None
    if not os.path.isfile(path):
        return _MISSING
    fault = file_fault(path, whole=True)
    if fault is not None:
        return f'cannot be read: {fault}'
    for companion in companions_of(path):
        fault = file_fault(companion, whole=True)
        if fault is not None:
            name = os.path.basename(companion)
            return f'needs {name} beside it, which cannot be read: {fault}'
    return None


def find_resume_point(
    work_dir: str, folders: Optional[Sequence[str]] = None
) -> tuple[Optional[str], Optional[str]]:
    """The checkpoint to go on from, None if the training has not saved one yet; and a sentence if
    it is not the one ``last_checkpoint`` names.

    If that one is missing, broken or not in the folders of this training, it is the file of that
    name in a work dir that was moved, or the newest whole one.
    """
    folders = list(folders or [work_dir])
    last = os.path.join(work_dir, 'last_checkpoint')
    named, problem, wrong = '', None, f'{last} is missing'
    if os.path.isfile(last):
        with open(last, errors='replace') as file:
            named = file.read().strip('\0 \n')
        wrong = f'{last} is empty'
    if named:
        problem = _what_is_wrong_with(named, folders)
        if problem is None:
            return named, None
        wrong = f'{last} names {named}, which {problem}'
        moved = os.path.join(work_dir, os.path.basename(named))
        if problem in (_MISSING, _ELSEWHERE) and what_is_wrong(moved) is None:
            return moved, f'{wrong}; going on from {moved}'
    others = [path for folder in folders for path in _checkpoints(folder)]
    for path in sorted(others, key=os.path.getmtime, reverse=True):
        if what_is_wrong(path) is None:
            return path, f'{wrong}; going on from the newest whole checkpoint, {path}'
    if not os.path.isfile(last) and not others:
        return None, None
    none_whole = f'of {len(others)} checkpoints beside it none is whole'
    found = none_whole if others else 'there is no other'
    example = named if problem == _ELSEWHERE else 'CHECKPOINT'
    raise UsageError(
        f'--resume: {wrong}, and {found}. Name a checkpoint by --resume {example}, or start anew '
        'without --resume'
    )


def _what_is_wrong_with(named: str, folders: Sequence[str]) -> Optional[str]:
    """:func:`what_is_wrong` with what ``last_checkpoint`` names, which may be anything."""
    if '://' not in named and not os.path.exists(named):
        return _MISSING
    if not is_inside(named, folders):
        return _ELSEWHERE
    return None if '://' in named else what_is_wrong(named)


def _checkpoints(folder: str) -> list[str]:
    """The checkpoints of a folder that can be gone on from; what is too broken to tell counts."""
    paths = [path for path in glob.glob(f'{glob.escape(folder)}/*.pth') if os.path.isfile(path)]
    known = {path: is_of_a_training(path) for path in paths}
    return [
        path for path in paths if known[path] or (known[path] is None and not is_companion(path))
    ]
