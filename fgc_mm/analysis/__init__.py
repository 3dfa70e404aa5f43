# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .collect import GateCollectorHook, concatenate, openness
from .runs import Run, add_run_arguments, execute_all, print_commands, read_figures, read_settings
from .variants import set_fields

__all__ = [
    'GateCollectorHook',
    'Run',
    'add_run_arguments',
    'concatenate',
    'execute_all',
    'openness',
    'print_commands',
    'read_figures',
    'read_settings',
    'set_fields',
]
