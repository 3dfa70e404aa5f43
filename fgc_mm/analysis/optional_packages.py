# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The optional packages of figures and reports."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..errors import MissingPackageError


def need(module: str, what: str) -> ModuleType:
    """Import a module of the extra ``analysis``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f'{what} needs the package {module.partition(".")[0]}, which cannot be imported '
            f"({error}); install the extra: pip install 'fgc-mm[analysis]' (in a clone: pip "
            "install '.[analysis]')"
        ) from error
