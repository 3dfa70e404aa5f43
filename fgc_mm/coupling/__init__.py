# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .approximate import ApproximateSearch
from .coupling import Coupling
from .layer_coupling import CouplingResult, LayerCoupling
from .memory_bank import MemoryBank
from .neighbors import ExactSearch, LabelSource, nearest_neighbors
from .overlap import TurnoverMeter, neighbor_overlap
from .parallel import map_layers

__all__ = [
    'ApproximateSearch',
    'Coupling',
    'CouplingResult',
    'ExactSearch',
    'LabelSource',
    'LayerCoupling',
    'MemoryBank',
    'TurnoverMeter',
    'map_layers',
    'nearest_neighbors',
    'neighbor_overlap',
]
