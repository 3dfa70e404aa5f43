# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which arguments a class does not have, or has of another type."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ...errors import UsageError
from ..messages import did_you_mean, shortened

_MOST_NAMES = 25
_WORDS: dict[Any, str] = {int: 'a whole number', float: 'a number', str: 'a text'}
_WORDS.update({bool: 'True or False', type(None): 'None'})


def argument_faults(what: Callable, arguments: Mapping[str, Any], key: str) -> list[str]:
    """Arguments that a class does not have or, if it is one of ours, of another type.

    Nothing is said where a class may take more than can be seen.
    """
    known, closed = arguments_of(what)
    faults = {}
    for name, value in arguments.items():
        if name in known:
            hint = _hints(known[name]).get(name, Any) if _is_ours(known[name]) else Any
            if not fits(value, hint):
                faults[name] = f' must be {describe(hint)}'
        elif closed:
            choice = f'; it has {", ".join(list(known)[:_MOST_NAMES])}' if known else ''
            near = did_you_mean(name, known) or choice
            more = getattr(what, 'advice', '')
            faults[name] = f': {what.__name__} has no argument {name!r}{near}{more}'
    return [f'{key}.{n}={shortened(repr(arguments[n]), 80)}{text}' for n, text in faults.items()]


def check_arguments(what: Callable, arguments: Mapping[str, Any]) -> None:
    """Raise a UsageError for the first fault of the arguments of a class."""
    for fault in argument_faults(what, arguments, what.__name__):
        raise UsageError(fault)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; what cannot be told counts as fitting."""
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


def arguments_of(what: Any) -> tuple[dict[str, Callable], bool]:
    """Name -> constructor of all arguments, those handed on to bases too, and if these are all.

    A class that hands ``**options`` on to an object of another names it, with the options that it
    gives itself, in ``options_of``.
    """
    if hasattr(what, 'arguments'):  # a builder that says itself what it takes
        return what.arguments(), True
    found: dict[str, Callable] = {}
    bases = getattr(what, '__mro__', ())
    inits = {vars(base)['__init__']: base for base in bases if '__init__' in vars(base)}
    closed = False
    options_of: dict[Any, Sequence[str]] = {}
    for init, owner in inits.items() if bases else ((what, what),):
        if not inspect.isfunction(init):
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, init)
        open_ = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        options_of = vars(owner).get('options_of', {})
        closed = bool(options_of) or not open_
        if closed or not _is_ours(init):  # may take some out, or drop them
            break
    for other, given in options_of.items():
        for name, init in arguments_of(other)[0].items():
            default = inspect.signature(init).parameters[name].default
            if default is not inspect.Parameter.empty and name not in given:
                found.setdefault(name, init)
    return found, closed


def _is_ours(init: Callable) -> bool:
    return init.__module__.startswith('fgc_mm.')


def _hints(init: Callable) -> dict[str, Any]:
    try:
        return get_type_hints(init)
    except Exception:  # names that exist for type checkers only
        return {}
