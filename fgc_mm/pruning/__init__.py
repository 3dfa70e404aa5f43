# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .criteria import CRITERIA, l2, taylor
from .prune import prune

__all__ = ['CRITERIA', 'l2', 'prune', 'taylor']
