# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How far a long analysis is, and how long it still takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY = 15.0  # seconds between two lines where there is no terminal


class Advance(Protocol):
    """Call it with how many more are done."""

    def __call__(self, done: int = 1) -> None: ...


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """A bar with an estimate on stderr, or a line now and then in a log file.

    Example:
        >>> with progress('pictures', 100) as advance:
        ...     advance(10)
    """
    if not sys.stderr.isatty():
        yield _Lines(what, total)
        return
    columns = (
        TextColumn('{task.description}'),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done=1: bar.advance(task, done)


class _Lines:
    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.begin = self.shown = time.monotonic()

    def __call__(self, done: int = 1) -> None:
        self.done += done
        now = time.monotonic()
        if now - self.shown < _EVERY:
            return
        self.shown = now
        left = (now - self.begin) / self.done * (self.total - self.done)
        print(
            f'{self.what}: {self.done} of {self.total}, about {left:.0f} s left',
            file=sys.stderr,
            flush=True,
        )
