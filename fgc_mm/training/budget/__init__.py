# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .controller import BudgetController, BudgetState
from .hook import BudgetHook

__all__ = [
    'BudgetController',
    'BudgetHook',
    'BudgetState',
]
