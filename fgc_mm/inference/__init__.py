# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .sparse import disable_sparse, enable_sparse, is_sparse
from .sparse_hook import SparseInferenceHook, add_sparse_hook

__all__ = ['SparseInferenceHook', 'add_sparse_hook', 'disable_sparse', 'enable_sparse', 'is_sparse']
