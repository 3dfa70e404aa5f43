# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Reading a config by its path or its name in a package, and going through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config

from ...errors import UsageError
from ..messages import did_you_mean, sentence
from .scopes import find_config


def config_path(name: str) -> str:
    """The path of a config that may be named as in ``_base_``, with ``package::`` before it."""
    return str(find_config(name)) if '::' in name else name


def read_config(path: str) -> Config:
    """Read a config file.

    Args:
        path (str): Its path, or its name in a package: ``fgc_mm::demo/resnet18_digits_gated.py``.
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


def dicts_in(node: Any, key: str = '') -> Iterator[tuple[str, Any]]:
    """Every dict of a config, outer ones first, with the key that leads to it."""
    items: Any = enumerate(node) if isinstance(node, (list, tuple)) else ()
    if isinstance(node, Mapping):
        yield key, node
        items = node.items()
    for name, value in items:
        yield from dicts_in(value, f'{key}.{name}')


def type_name(node: Any) -> str:
    """The type of a part of a config without its scope, '' if it has none; new-style configs have
    the class itself."""
    kind = node.get('type') if isinstance(node, Mapping) else None
    name = kind if isinstance(kind, str) else getattr(kind, '__name__', '')
    return name.rpartition('.')[2]


def _suggestion(path: Path) -> str:
    near = did_you_mean(str(path), map(str, Path('configs').rglob('*.py')))
    return near or '; the ones that come with fgc_mm are under configs/'
