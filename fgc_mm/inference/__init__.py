# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .export import Exported, Picture, export
from .export_files import export_checkpoint
from .freeze import FrozenReport, freeze, frozen_report
from .memory import keep_memory
from .network_files import load, save
from .slim import GateUsage, Slimmed, slim
from .slim_files import load_fitting, slim_checkpoint
from .sparse_hook import SparseInferenceHook, add_sparse_hook

__all__ = [
    'Exported',
    'FrozenReport',
    'GateUsage',
    'Picture',
    'Slimmed',
    'SparseInferenceHook',
    'add_sparse_hook',
    'export',
    'export_checkpoint',
    'freeze',
    'frozen_report',
    'keep_memory',
    'load',
    'load_fitting',
    'save',
    'slim',
    'slim_checkpoint',
]
