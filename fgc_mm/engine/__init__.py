# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .batch_shaping_hook import BatchShapingHook, batch_shaping
from .beta import beta_cdf, beta_pdf
from .budget_control import BudgetController, BudgetState
from .budget_hook import BudgetHook
from .density_hook import DensityHook
from .fgc_hook import FGCHook
from .finite_hook import FiniteHook, NonFiniteError
from .gate_loss_hook import GateLossHook, SetupError, records_of
from .l0_hook import L0Hook, l0
from .random_state_hook import RandomStateHook
from .safe_checkpoint_hook import CheckpointError, SafeCheckpointHook
from .schedules import Schedule, build_schedule, epochs_seen
from .task_model import forward_argument, unwrap

__all__ = [
    'BatchShapingHook',
    'BudgetController',
    'BudgetHook',
    'BudgetState',
    'CheckpointError',
    'DensityHook',
    'FGCHook',
    'FiniteHook',
    'GateLossHook',
    'L0Hook',
    'NonFiniteError',
    'RandomStateHook',
    'SafeCheckpointHook',
    'Schedule',
    'SetupError',
    'batch_shaping',
    'beta_cdf',
    'beta_pdf',
    'build_schedule',
    'epochs_seen',
    'forward_argument',
    'l0',
    'records_of',
    'unwrap',
]
