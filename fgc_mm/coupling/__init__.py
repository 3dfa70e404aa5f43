# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .approximate import ApproximateSearch
from .contrast import contrast_loss
from .layer_coupling import CouplingResult, LayerCoupling
from .memory_bank import MemoryBank
from .neighbors import ExactSearch, LabelSource, nearest_neighbors
from .overlap import TurnoverMeter, neighbor_overlap
from .parallel import map_layers, with_gradient

__all__ = [
    'ApproximateSearch',
    'CouplingResult',
    'ExactSearch',
    'LabelSource',
    'LayerCoupling',
    'MemoryBank',
    'TurnoverMeter',
    'contrast_loss',
    'map_layers',
    'nearest_neighbors',
    'neighbor_overlap',
    'with_gradient',
]
