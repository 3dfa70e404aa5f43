# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .criteria import CRITERIA, features, l2, taylor
from .prune import prune

__all__ = ['CRITERIA', 'features', 'l2', 'prune', 'taylor']
