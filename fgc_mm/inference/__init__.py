# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .export import Exported, Picture, export
from .export_files import export_checkpoint
from .memory import keep_memory
from .slim import GateUsage, Slimmed, slim
from .slim_files import load_fitting, slim_checkpoint
from .slim_report import format_slim_report
from .sparse import disable_sparse, enable_sparse, is_sparse
from .sparse_hook import SparseInferenceHook, add_sparse_hook, has_gated_backbone

__all__ = [
    'Exported',
    'GateUsage',
    'Picture',
    'Slimmed',
    'SparseInferenceHook',
    'add_sparse_hook',
    'disable_sparse',
    'enable_sparse',
    'export',
    'export_checkpoint',
    'format_slim_report',
    'has_gated_backbone',
    'is_sparse',
    'keep_memory',
    'load_fitting',
    'slim',
    'slim_checkpoint',
]
