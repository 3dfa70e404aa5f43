# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Reading a config by its path or its name in a package."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from mmengine.config import Config

from ..errors import UsageError
from .checkpoint_file import checkpoint_fault
from .config_scopes import find_config
from .mistakes import sentence


def config_path(name: str) -> str:
    """The path of a config that may be named as in ``_base_``, with ``package::`` before it."""
    if '::' not in name:
        return name
    try:
        return str(find_config(name))
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_config(path: str) -> Config:
    """Read a config file.

    Args:
        path (str): Its path, or its name in a package: ``fgc_mm::demo/resnet18_digits_gated.py``.

    Raises:
        UsageError: If the file does not exist or cannot be read as a config.
    """
    path = config_path(path)
    if not Path(path).is_file():
        raise UsageError(f'config {path} does not exist{_suggestion(Path(path))}')
    try:
        return Config.fromfile(path)
    except ImportError as error:
        reason = error.__cause__ or error  # mmengine adds the whole search path
        raise UsageError(f'config {path} needs a package that is missing: {reason}') from error
    except SyntaxError as error:
        raise UsageError(f'config {path} is no valid Python: {error}') from error
    except Exception as error:  # a config is Python and may raise anything
        raise UsageError(f'config {path} cannot be read: {sentence(error)}') from error


def _suggestion(path: Path) -> str:
    known = {p.stem: p for p in Path('configs').rglob('*.py')} if Path('configs').is_dir() else {}
    near = difflib.get_close_matches(path.stem, known, n=3)
    if near:
        return '; did you mean ' + ' or '.join(str(known[name]) for name in near) + '?'
    return '; the ones that come with fgc_mm are under configs/'


def existing(checkpoint: str) -> str:
    """The path of a checkpoint that is there, and may be one."""
    if '://' in checkpoint:
        return checkpoint
    if not os.path.exists(checkpoint):
        raise UsageError(f'checkpoint {checkpoint} does not exist')
    fault = checkpoint_fault(checkpoint)
    if fault is not None:
        raise UsageError(fault)
    return checkpoint
