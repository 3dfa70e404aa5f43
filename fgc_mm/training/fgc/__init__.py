# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .hook import FGCHook

__all__ = [
    'FGCHook',
]
