# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Paths that come out of a file never lead out of the work dir."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from mmengine.hooks import CheckpointHook, Hook
from mmengine.runner import Runner


def is_inside(path: Any, folders: Iterable[Optional[str]]) -> bool:
    """Whether a path, as a file may give it, is below one of some folders or addresses such as
    ``s3://...``; links are followed."""
    if not isinstance(path, str) or not path or '\0' in path:
        return False
    tops = [folder for folder in folders if folder]
    if '://' in path:
        inside = any(path.startswith(f'{top.rstrip("/")}/') for top in tops)
        return inside and '..' not in path.split('/')
    real = os.path.realpath(path)
    local = (os.path.realpath(top) for top in tops if '://' not in top)
    return any(real.startswith(top.rstrip(os.sep) + os.sep) for top in local)


def checkpoint_folders(work_dir: str, out_dirs: Iterable[Optional[str]]) -> list[str]:
    """Where a run writes checkpoints: its work dir, and those that ``CheckpointHook`` names."""
    name = os.path.basename(work_dir.rstrip(os.sep))
    return [work_dir, *(os.path.join(out, name) for out in out_dirs if out)]


def run_folders(runner: Runner) -> list[str]:
    """:func:`checkpoint_folders` of a run that has not begun to train."""
    hooks = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
    return checkpoint_folders(runner.work_dir, [hook.out_dir for hook in hooks])


class WorkDirHook(Hook):
    """Takes out of a checkpoint the paths that lead out of the work dir.

    mmengine's ``CheckpointHook`` believes what a resumed checkpoint says about the files it is
    to delete or to publish: the best checkpoint so far, and those that are kept.
    """

    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        hub = checkpoint.get('message_hub') if isinstance(checkpoint, dict) else None
        info = hub.get('runtime_info') if isinstance(hub, dict) else None
        if not isinstance(info, dict):
            return
        folders = run_folders(runner)
        for key in [key for key in info if str(key).startswith(('best_ckpt', 'last_ckpt'))]:
            if info[key] is not None and not is_inside(info[key], folders):
                runner.logger.warning(
                    f'the checkpoint says {key}={info[key]!r}, which is not in the work dir '
                    f'{runner.work_dir}: that file is left alone'
                )
                del info[key]
        kept = info.get('keep_ckpt_ids')
        if kept is not None and not _are_numbers(kept):
            runner.logger.warning(
                f'the checkpoint says keep_ckpt_ids={kept!r}, which are no numbers of checkpoints: '
                'older ones are left alone'
            )
            del info['keep_ckpt_ids']


def _are_numbers(kept: Any) -> bool:
    return isinstance(kept, Sequence) and all(type(number) is int for number in kept)
