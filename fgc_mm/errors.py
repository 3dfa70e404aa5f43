# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The errors of fgc_mm: one base class, and a kind for each sort of cause.

A message says all there is to say: the key or the file, what it was, and what would be right.
The command line prints it without a traceback and ends with ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FgcError(Exception):
    """What went wrong, in words for the user."""

    exit_code = 2


class UsageError(FgcError, ValueError):
    """A config, an option or an argument asks for what cannot be done."""


class DataError(FgcError, RuntimeError):
    """A file of a data set is missing, damaged or does not fit."""


class CheckpointError(FgcError, ValueError):
    """A checkpoint cannot be read, trusted, written, or belongs to another network."""


class NonFiniteError(FgcError, ValueError):
    """NaN or Inf in a training that is not to go on with it."""


class MissingPackageError(FgcError, ImportError):
    """An optional package is needed and not installed."""


class RunError(FgcError):
    """What stopped a run of one process or of all: every rank tells its own."""


@contextmanager
def in_context(before: str, after: str = '') -> Iterator[None]:
    """Say of an error of fgc_mm raised inside whom it concerns; its kind stays.

    Args:
        before (str): What goes in front of the message, without the colon; may be ''.
        after (str): What goes behind it. Defaults to ''.
    """
    try:
        yield
    except FgcError as error:
        front = f'{before}: ' if before else ''
        raise type(error)(f'{front}{error}{after}') from error
