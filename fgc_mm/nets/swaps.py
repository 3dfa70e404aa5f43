# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A config that inherits one network and names another."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from mmengine.config import Config

from ..errors import UsageError
from ..runtime.config.scopes import find_config
from .names import FAMILIES

Keys = tuple[str, ...]


def types_of(model: Any, path: Keys = ()) -> dict[Keys, str]:
    """Where in the config of a model a type stands, without its scope."""
    if not isinstance(model, Mapping):
        return {}
    kind = model.get('type')
    found = {path: kind.rpartition('.')[2]} if isinstance(kind, str) else {}
    for key, value in model.items():
        found.update(types_of(value, (*path, key)))
    return found


def check_swaps(cfg: Config, before: Mapping[Keys, str]) -> None:
    """See that ``type='GatedResNet'`` was written over a ResNet.

    Whatever else the base of a config has, ``type`` alone exchanges: the arguments of a
    SE-ResNet are those of a ResNet, too. Where nothing of the base is kept (``_delete_=True``)
    another network is meant. A config that computes its model is not looked into.

    Args:
        cfg (Config): The config, read from a file.
        before (Mapping): What :func:`types_of` said of its model before it got the options of the
            command line.

    Raises:
        UsageError: If the base has another network; it names both and what to write.
    """
    for path, mine in types_of(cfg.get('model')).items():
        if mine not in FAMILIES:
            continue
        if before.get(path, mine) != mine:
            _compare(mine, path, '--cfg-options', before[path], str(cfg.filename))
        elif cfg.filename and Path(cfg.filename).is_file():
            where = cfg.filename
            for file, theirs in _history(cfg.filename, path):
                if theirs != mine:
                    _compare(mine, path, where, theirs, file)
                    break
                where = file


def _compare(mine: str, path: Keys, where: str, theirs: str, below: str) -> None:
    if theirs == FAMILIES[mine]:
        return
    suited = next((name for name, network in FAMILIES.items() if theirs in (network, name)), None)
    key = '.'.join(('model', *path))
    instead = f'type={suited!r}, or ' if suited else ''
    raise UsageError(
        f'{where}: {key}.type={mine!r} gates a {FAMILIES[mine]}, but it is written over the '
        f'type={theirs!r} of {below}; write {instead}{path[-1] if path else "model"}='
        f"dict(_delete_=True, type='Gated', backbone=_base_.{key}), or _delete_=True and all "
        'arguments if another network is meant'
    )


def _history(file: str, path: Keys) -> Iterator[tuple[str, str]]:
    """The types a config and its bases write at a place, the last one first, as far as they are
    plainly there: file and type."""
    if not file.endswith('.py') or Config._is_lazy_import(file):
        return
    for statement in ast.parse(Path(file).read_text(encoding='utf-8')).body:
        if not isinstance(statement, ast.Assign) or ast.unparse(statement.targets[0]) != 'model':
            continue
        node: Optional[ast.AST] = statement.value
        for key in (*path, None):
            entries = _entries(node)
            if entries is None or '_delete_' in entries:
                return  # computed, or nothing is kept
            node = entries.get('type' if key is None else key)
            if node is None and None in entries:
                return
            if node is None:
                break
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield file, node.value.rpartition('.')[2]
        elif node is not None:
            return
    for base in Config._get_base_files(file):
        yield from _history(_place(base, file), path)


def _place(base: str, file: str) -> str:
    """Where a base lies. mmengine reads all metafiles of a package to find one of its."""
    if '::' in base:
        with suppress(UsageError):
            found = find_config(base)
            if found.is_file():
                return os.path.normpath(found)
    return os.path.normpath(Config._get_cfg_path(base, file)[0])


def _entries(node: Optional[ast.AST]) -> Optional[dict[Optional[str], ast.AST]]:
    """What a dict in the text of a config has, None under what is unpacked; None for another."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == 'dict' and not node.args:
        return {word.arg: word.value for word in node.keywords}
    if isinstance(node, ast.Dict):
        return {
            str(key.value) if isinstance(key, ast.Constant) else None: value
            for key, value in zip(node.keys, node.values, strict=True)
        }
    return None
