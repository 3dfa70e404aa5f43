# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .batch_shaping_hook import BatchShapingHook, batch_shaping
from .beta import beta_cdf, beta_pdf
from .budget.budget import Budget
from .budget.controller import BudgetController
from .budget.hook import BudgetHook
from .density_hook import DensityHook
from .distillation.distillation import Distillation
from .distillation.hook import DistillationHook
from .fgc.hook import FGCHook
from .gate_loss_hook import GateLossHook
from .l0_hook import L0Hook, l0
from .schedules import build_schedule, epochs_seen
from .static_pruning_hook import StaticPruningHook

__all__ = [
    'BatchShapingHook',
    'Budget',
    'BudgetController',
    'BudgetHook',
    'DensityHook',
    'Distillation',
    'DistillationHook',
    'FGCHook',
    'GateLossHook',
    'L0Hook',
    'StaticPruningHook',
    'batch_shaping',
    'beta_cdf',
    'beta_pdf',
    'build_schedule',
    'epochs_seen',
    'l0',
]
