# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .checkpoints.random_state_hook import RandomStateHook
from .checkpoints.safe_checkpoint_hook import SafeCheckpointHook
from .module_hooks import Attachments, forward_argument, in_evaluation, one_batch, unwrap
from .numbers.finite_hook import FiniteHook

__all__ = [
    'Attachments',
    'FiniteHook',
    'RandomStateHook',
    'SafeCheckpointHook',
    'forward_argument',
    'in_evaluation',
    'one_batch',
    'unwrap',
]
