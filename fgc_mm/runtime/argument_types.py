# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which argument of a class has the wrong type, found after building it failed."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS: dict[Any, str] = {
    int: 'a whole number',
    float: 'a number',
    str: 'a text',
    bool: 'True or False',
    type(None): 'None',
}


def wrong_types(cls: type, arguments: Mapping[str, Any]) -> list[str]:
    """Arguments whose values are not what the constructor's type hints say.

    Args:
        cls (type): A class; arguments that it hands on to its bases are found there.
        arguments (Mapping): What it was given.

    Returns:
        list[str]: ``key=value must be ...`` for each; none without type hints.
    """
    hints = _hints(cls)
    return [
        f'{key}={value!r} must be {describe(hints[key])}'
        for key, value in arguments.items()
        if key in hints and not fits(value, hints[key])
    ]


def check_types(cls: type, arguments: Mapping[str, Any]) -> None:
    """See that arguments have the types of a class's hints.

    Args:
        cls (type): The class.
        arguments (Mapping): Some of its arguments.

    Raises:
        ValueError: Naming the class and those that have not.
    """
    wrong = wrong_types(cls, arguments)
    if wrong:
        raise ValueError(f'{cls.__name__}: {"; ".join(wrong)}')


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; what cannot be told counts as fitting.

    Args:
        value (Any): The value.
        hint (Any): A type hint.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if hint is float or hint is int:
        kinds = (int, float) if hint is float else (int,)
        return isinstance(value, kinds) and not isinstance(value, bool)
    if origin is None:
        return not inspect.isclass(hint) or isinstance(value, hint)
    if not inspect.isclass(origin) or not isinstance(value, origin):
        return not inspect.isclass(origin)
    if issubclass(origin, Sequence):
        one = inner[0] if inner else Any
        items: Any = value
        return not isinstance(value, str) and all(fits(item, one) for item in items)
    return True


def describe(hint: Any) -> str:
    """A type hint in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return ' or '.join(dict.fromkeys(map(describe, inner)))
    if origin is Literal:
        return ' or '.join(map(repr, inner))
    if hint in _WORDS:
        return _WORDS[hint]
    kind = origin or hint
    if inspect.isclass(kind) and issubclass(kind, Mapping):
        return 'a dict'
    if inspect.isclass(kind) and issubclass(kind, Sequence):
        return f'a list ({describe(inner[0])} each)' if inner else 'a list'
    return getattr(kind, '__name__', str(kind))


def _hints(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        init = vars(base).get('__init__')
        if not inspect.isfunction(init):
            continue
        try:
            hints = get_type_hints(init)
        except Exception:  # names that exist for type checkers only
            continue
        for name, hint in hints.items():
            found.setdefault(name, hint)
        parameters = inspect.signature(init).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break  # nothing is handed on
    return found
