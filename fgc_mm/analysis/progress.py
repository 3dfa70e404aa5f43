# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How far a long analysis is, and how long it still takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar with an estimate, on a terminal; nothing is written to a log.

    Example:
        >>> with progress('pictures', 100) as advance:
        ...     advance(10)
    """
    console = Console(stderr=True)
    columns = (TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done=1: bar.advance(task, done)
