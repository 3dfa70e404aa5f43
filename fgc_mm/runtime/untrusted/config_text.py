# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The config inside a checkpoint, read without running it."""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
from typing import Any, Optional

_MAKERS = ('dict', 'list', 'tuple', 'set', 'frozenset', 'range', 'slice', 'float', 'int', 'complex')
"""Builtins a plain value may be made with."""
_TEMPLATE = re.compile(r'\{\{\s*(\$|file|_base_)')


def find_code(text: str) -> Optional[str]:
    """What in a config's text would do more than make plain values.

    ``Config.pretty_text``, which checkpoints hold, is nothing but assignments of
    literals and ``dict(...)``. Text that cannot be parsed cannot be run either, and a
    name that is not there ends a run before anything happens. Of others it is the first such piece
    with its line.
    """
    if _TEMPLATE.search(text):  # filled in by mmengine before the text is run
        return 'a template, {{ ... }}'
    known: set[str] = set()
    for statement in _statements(text):
        found: Optional[ast.AST] = statement
        if isinstance(statement, ast.Assign):
            names = [t.id for t in statement.targets if isinstance(t, ast.Name)]
            if len(names) == len(statement.targets):
                found = _code(statement.value, known)
            known.update(names)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if found is not None:
            piece = ast.unparse(found)
            short = piece if len(piece) <= 60 else piece[:57] + '...'
            return f'line {getattr(found, "lineno", 0)}, {short.splitlines()[0]}'
    return None


def plain_values(text: str) -> dict[str, Any]:
    """What a config's text assigns, without running it; what is no plain value is left out."""
    values: dict[str, Any] = {}
    for statement in _statements(text) if find_code(text) is None else ():
        if isinstance(statement, ast.Assign):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                value = _value(statement.value)
                values.update((t.id, value) for t in statement.targets if isinstance(t, ast.Name))
    return values


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _value(node: Any) -> Any:
    """Of literals, ``dict(...)``, ``list(...)`` and ``tuple(...)``."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, 'id', None)
        if name == 'dict' and not node.args:
            return {keyword.arg or '': _value(keyword.value) for keyword in node.keywords}
        if name in ('list', 'tuple') and not node.keywords and len(node.args) == 1:
            return {'list': list, 'tuple': tuple}[name](_value(node.args[0]))
        raise ValueError(name)
    if isinstance(node, ast.Dict):
        keys = [_value(key) for key in node.keys]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_value(item) for item in node.elts]
        return tuple(items) if isinstance(node, ast.Tuple) else items
    return ast.literal_eval(node)


def _code(node: ast.AST, known: set[str]) -> Optional[ast.AST]:
    """The first part of an expression that is no plain value."""
    parts: list[Optional[ast.expr]] = []
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        parts = [*node.elts]
    elif isinstance(node, ast.Dict):
        parts = [*node.keys, *node.values]
    elif isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    elif isinstance(node, ast.Call) and getattr(node.func, 'id', None) in _MAKERS:
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Name) and (node.id in known or node.id in _MAKERS):
        return None
    elif not isinstance(node, ast.Constant):
        # Calls, attributes and names that begin with a name nobody has set end the run there.
        root = node
        while isinstance(root, (ast.Attribute, ast.Call)):
            root = root.func if isinstance(root, ast.Call) else root.value
        return None if isinstance(root, ast.Name) and not _is_set(root.id, known) else node
    found = (_code(part, known) for part in parts if part is not None)
    return next((part for part in found if part is not None), None)


def _is_set(name: str, known: set[str]) -> bool:
    return name in known or name in dir(builtins) or name.startswith('_')
