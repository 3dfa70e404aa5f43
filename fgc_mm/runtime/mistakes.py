# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Mistakes of a user as one message: what the packages below raise, in a sentence."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Optional

import torch.nn as nn
from mmengine.registry import OPTIMIZERS, Registry
from mmengine.runner import Runner

from ..errors import CheckpointError, DataError, NonFiniteError, RunError, UsageError
from .argument_types import wrong_types

HINT = '(FGC_MM_TRACEBACK=1 shows where)'
_NO_OPS = (
    'mmcv is installed without its compiled ops: reinstall it, with torch already '
    'there, by pip install --no-build-isolation --no-cache-dir --force-reinstall '
    '--no-deps and the name you have it by (onedl-mmcv or mmcv)'
)
_MOST_LINES = 12
_MOST_NAMES = 25


# These say all there is to say, and the tools know what to do with them.
CLEAR = (
    UsageError,
    UsageError,
    DataError,
    CheckpointError,
    CheckpointError,
    CheckpointError,
    NonFiniteError,
)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn whatever is raised inside into one message.

    With ``FGC_MM_TRACEBACK`` set in the environment errors pass as they are.

    Args:
        what (str): Subject of the message, such as 'the config cannot be built'.

    Raises:
        RunError: For any error that is not clear by itself.
    """
    try:
        yield
    except CLEAR:
        raise
    except Exception as error:
        if os.environ.get('FGC_MM_TRACEBACK'):
            raise
        raise RunError(f'{what}: {sentence(error)}\n{hint(error)}') from error


def hint(error: BaseException) -> str:
    """What to do about an error, beside reading its message."""
    return _NO_OPS if 'mmcv._ext' in str(error) else HINT


def sentence(error: BaseException) -> str:
    """What an error says, for somebody who did not write the code that raised it.

    Arguments and types that do not exist are named together with those that
    do and look alike; errors of data workers lose their inner traceback.

    Args:
        error (BaseException): Any error.
    """
    try:
        return _checkpoint(error) + _sentence(error)
    except Exception:  # a frame may hold anything; never hide the error itself
        return f'{type(error).__name__}: {error}'


def _sentence(error: BaseException) -> str:
    kind, text = type(error).__name__, str(error).strip()
    if 'Original Traceback (most recent call last)' in text:  # of a data worker
        kind, _, text = text.splitlines()[-1].partition(': ')
    if isinstance(error, OSError) and error.strerror:
        return f'{error.strerror}: {error.filename}' if error.filename else error.strerror
    # What some versions of mmengine put before the message of a constructor.
    text = re.sub(r'^[\'"]?class `(\w+)` in [\w./\\-]+: (?:\1: )?', r'\1: ', text)
    special = _wrong_argument(error, text) or _unknown_type(error, text)
    if special:
        return special
    misfits, ours = _misfits(error, text)
    if misfits and (ours or isinstance(error, (TypeError, AttributeError))):
        return misfits
    if isinstance(error, KeyError):
        text = f'{error.args[0]}' if error.args else ''
        if re.fullmatch(r'[\w.]*', text):
            return f'KeyError: the key {text!r} is missing{_owner(error)}'
    if isinstance(error, AttributeError) and 'ConfigDict' in text:
        return f'{text}: a key of the config is missing{_owner(error)}'
    lines = text.splitlines() or ['(no message)']
    more = ['...'] if len(lines) > _MOST_LINES else []
    shown = '\n'.join([_cut(line) for line in lines[:_MOST_LINES]] + more)
    if _is_ours(error):
        return shown
    return f'{kind}: {shown}{_owner(error)}' + (f'; {misfits}' if misfits else '')


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``'; did you mean ...?'``, or nothing if nothing is alike."""
    words = dict.fromkeys(map(str, known))
    near = difflib.get_close_matches(str(word), words, n=2, cutoff=0.6)
    return f'; did you mean {" or ".join(map(repr, near))}?' if near else ''


def _frames(error: BaseException) -> list[FrameType]:
    """The frames an error came through, the innermost first."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    before = error.__context__
    if before is not None and type(before) is type(error) and str(before) in str(error):
        return _frames(before) + found[::-1]  # raised again with a name in front
    return found[::-1]


def _building(error: BaseException) -> tuple[Any, dict[str, Any]]:
    """The class that was being built, by a registry or directly, and its arguments."""
    return next(_builds(error), (None, {}))


def _builds(error: BaseException) -> Iterator[tuple[Any, dict[str, Any]]]:
    """All of them, the innermost first."""
    for frame in _frames(error):
        if frame.f_code.co_name == 'build_from_cfg':
            yield frame.f_locals.get('obj_cls'), dict(frame.f_locals.get('args') or {})
        if frame.f_code.co_name == '__init__' and 'self' in frame.f_locals:
            cls, init = type(frame.f_locals['self']), frame.f_code
            # Not the constructor of a base: what the class itself was given is further out.
            if getattr(vars(cls).get('__init__'), '__code__', None) is init:
                values = inspect.getargvalues(frame)
                given = {name: values.locals[name] for name in values.args[1:]}
                yield cls, {**given, **(values.locals.get(values.keywords or '') or {})}


def _owner(error: BaseException) -> str:
    """Who it happened to: the class that was built, or the object that worked."""
    cls, _ = _building(error)
    if inspect.isclass(cls):
        return f' (while building {cls.__name__})'
    for frame in _frames(error):
        worker = frame.f_locals.get('self')
        if isinstance(worker, nn.Module):
            return _layer(error)
        if worker is not None:
            return f' (in {type(worker).__name__})'
    return ''


def _layer(error: BaseException) -> str:
    """The layer whose forward failed, and where it is in the model."""
    modules = [f.f_locals.get('self') for f in _frames(error) if f.f_code.co_name != '__init__']
    found = [module for module in modules if isinstance(module, nn.Module)]
    if not found:
        return ''
    names = [name for name, module in found[-1].named_modules() if module is found[0]]
    return f' (in {names[0] if names else ""}: {_cut(repr(found[0]), 100)})'


def _cut(text: str, most: int = 300) -> str:
    text = ' '.join(text.split())
    return text if len(text) <= most else f'{text[:most]} ...'


def _checkpoint(error: BaseException) -> str:
    """Which checkpoint it was, if one was being loaded."""
    for frame in _frames(error):
        if frame.f_code.co_name in ('load_from_local', 'load_checkpoint', 'resume'):
            filename = frame.f_locals.get('filename')
            if isinstance(filename, str):
                return f'checkpoint {filename} cannot be used: '
    return ''


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it: its messages need no type in front."""
    frames = _frames(error)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    inside = bool(frames) and frames[0].f_code.co_filename.startswith(root + os.sep)
    return inside and isinstance(error, (ValueError, TypeError, KeyError, ImportError, OSError))


def _wrong_argument(error: BaseException, text: str) -> Optional[str]:
    if not isinstance(error, (TypeError, AttributeError)):
        return None
    cls, _ = _building(error)
    name = cls.__name__ if inspect.isclass(cls) else None
    unknown = re.search(
        r"(\w+)?(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", text
    )
    if unknown:
        if '__init__' not in text:
            return f'{unknown[1]} has no argument {unknown[2]!r}'
        direct = _frames(error)[0].f_globals.get(unknown[1] or '')
        if inspect.isclass(direct) and not (name and issubclass(cls, direct)):
            cls, name = direct, direct.__name__  # built without a registry
        known = _arguments(cls) if inspect.isclass(cls) else []
        choice = f'; it has {", ".join(known[:_MOST_NAMES])}' if known else ''
        return (
            f'{name or unknown[1]} has no argument {unknown[2]!r}'
            f'{did_you_mean(unknown[2], known) or choice}'
        )
    lacking = re.search(r'(\w+)?(?:\.__init__)?\(\) missing \d+ required .*?arguments?: (.*)', text)
    if lacking:
        return f'{name or lacking[1]} needs the argument {lacking[2]}'
    return None


def _misfits(error: BaseException, text: str) -> tuple[str, bool]:
    """The arguments that do not have the type their class asks for, and whether it is ours.

    Of ours the outermost class, which is the one in the config; of others the
    innermost, whose hints may be loose further out.
    """
    found: list[tuple[type, list[str]]] = []
    if not isinstance(error, (TypeError, AttributeError, ValueError)):
        return '', False
    for cls, given in _builds(error):
        if not inspect.isclass(cls) or issubclass(cls, Runner):
            continue
        if text.startswith(cls.__name__):  # written for users
            return '', False
        wrong = wrong_types(cls, given)
        if wrong:
            found.append((cls, wrong))
    ours = [(cls, wrong) for cls, wrong in found if cls.__module__.startswith('fgc_mm.')]
    if not found:
        return '', False
    cls, wrong = ours[-1] if ours else found[0]
    return f'{cls.__name__}: {"; ".join(wrong)}', bool(ours)


def _arguments(cls: Any) -> list[str]:
    """All arguments of a class, those handed on to its bases too."""
    names: list[str] = []
    for base in cls.__mro__:
        init = vars(base).get('__init__')
        if inspect.isfunction(init):
            names += [p for p in inspect.signature(init).parameters if p not in ('self', 'kwargs')]
    return names


def _unknown_type(error: BaseException, text: str) -> Optional[str]:
    if isinstance(error, TypeError) and 'None is not a callable' in text:
        return _unknown_optimizer(error)
    if isinstance(error, TypeError) and text.startswith('cfg should be a dict'):
        given = [f.f_locals['cfg'] for f in _frames(error) if 'cfg' in f.f_locals]
        return f'{given[0]!r} stands where a dict must be, such as dict(type={given[0]!r})'
    if not isinstance(error, KeyError):
        return None
    missing = re.search(r'^[\'"]?(\S+) is not in the (?:\S+::)?(.+?) registry', text)
    frame = next(
        (f for f in _frames(error) if isinstance(f.f_locals.get('registry'), Registry)), None
    )
    registry: Any = frame.f_locals['registry'] if frame else None
    if missing:
        name, kind = missing[1], missing[2]
    elif 'Cannot find None in registry' in text and frame and 'layer_type' in frame.f_locals:
        name, kind = frame.f_locals['layer_type'], registry.name  # of mmcv's build_..._layer
    else:
        return None
    known = _names(registry) if registry is not None else []
    own = '; a class of your own has to be imported, by custom_imports = dict(imports=[...])'
    return f'type={name!r} is not in the {kind} registry{did_you_mean(name, known) or own}'


def _names(registry: Registry) -> list[str]:
    """The names in a registry and those above it."""
    names: list[str] = []
    node: Optional[Registry] = registry
    while node is not None:
        names += list(node.module_dict)
        node = node.parent
    return names


def _unknown_optimizer(error: BaseException) -> Optional[str]:
    """mmengine looks an optimizer up and does not look whether it found one."""
    for frame in _frames(error):
        name = (getattr(frame.f_locals.get('self'), 'optimizer_cfg', None) or {}).get('type')
        if isinstance(name, str):
            return (
                f'optim_wrapper.optimizer.type={name!r} is not in the optimizer registry'
                f'{did_you_mean(name, _names(OPTIMIZERS))}'
            )
    return None
