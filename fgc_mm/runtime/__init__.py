# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .finite_hook import FiniteHook
from .module_hooks import Attachments, Callback
from .random_state_hook import RandomStateHook
from .safe_checkpoint_hook import SafeCheckpointHook
from .task_model import forward_argument, unwrap

__all__ = [
    'Attachments',
    'Callback',
    'FiniteHook',
    'RandomStateHook',
    'SafeCheckpointHook',
    'forward_argument',
    'unwrap',
]
