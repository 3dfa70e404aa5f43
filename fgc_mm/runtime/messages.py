# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What other packages raise, in a sentence."""

from __future__ import annotations

import difflib
import linecache
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import FgcError, RunError

_HINT = '(FGC_MM_TRACEBACK=1 shows where)'
_NO_OPS = (
    'mmcv is installed without its compiled ops: reinstall it, with torch already '
    'there, by pip install --no-build-isolation --no-cache-dir --force-reinstall '
    '--no-deps and the name you have it by (onedl-mmcv or mmcv)'
)
_FROM_WORKER = 'Original Traceback (most recent call last)'
_MOST_LINES = 12


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn whatever is raised inside into one message.

    With ``FGC_MM_TRACEBACK`` set in the environment errors pass as they are.
    """
    try:
        yield
    except FgcError:
        raise
    except Exception as error:
        if os.environ.get('FGC_MM_TRACEBACK'):
            raise
        hint = _NO_OPS if 'mmcv._ext' in str(error) else _HINT
        raise RunError(f'{what}: {sentence(error)}{_place(error)}\n{hint}') from error


def sentence(error: BaseException) -> str:
    """What an error says; one of a data worker loses its inner traceback."""
    kind, text = type(error).__name__, str(error).strip()
    if isinstance(error, OSError) and error.strerror:
        return f'{error.strerror}: {error.filename}' if error.filename else error.strerror
    if _FROM_WORKER in text:
        kind, _, text = text.splitlines()[-1].partition(': ')
    if kind == 'KeyError' and re.fullmatch(r'\'?[\w.]*\'?', text):
        return f'KeyError: the key {text} is missing'
    lines = text.splitlines() or ['(no message)']
    return f'{kind}: ' + '\n'.join(map(shortened, lines[:_MOST_LINES]))


def shortened(text: str, most: int = 300) -> str:
    """A text in one line that is not too long."""
    text = ' '.join(text.split())
    return text if len(text) <= most else f'{text[:most]} ...'


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``'; did you mean ...?'``, or nothing if nothing is alike."""
    near = difflib.get_close_matches(str(word), dict.fromkeys(map(str, known)), n=2)
    return f'; did you mean {" or ".join(map(repr, near))}?' if near else ''


def _place(error: BaseException) -> str:
    """The line that raised an error of Python's own, whose message may be a single word or none."""
    plain = isinstance(error, (LookupError, TypeError, AttributeError, AssertionError))
    if not plain or _FROM_WORKER in str(error):
        return ''
    every = list(traceback.walk_tb(error.__traceback__))
    # Not the line of torch that looks attributes of a module up.
    frames = [f for f in every if '/torch/' not in f[0].f_code.co_filename] or every
    (frame, number), code = frames[-1], frames[-1][0].f_code
    name = getattr(code, 'co_qualname', code.co_name)  # with its class, since Python 3.11
    line = linecache.getline(code.co_filename, number, frame.f_globals)
    shown = f': {shortened(line, 100)}' if line.strip() else ''
    return f' (in {name}, {Path(code.co_filename).name}:{number}{shown})'
