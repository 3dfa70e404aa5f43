# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .approximate import ApproximateSearch
from .batch import gather_rows
from .coupling import Coupling
from .layer_coupling import CouplingResult, LayerCoupling
from .memory_bank import MemoryBank
from .neighbors import LabelSource, nearest_neighbors
from .overlap import TurnoverMeter, neighbor_overlap
from .parallel import map_layers

__all__ = [
    'ApproximateSearch',
    'Coupling',
    'CouplingResult',
    'LabelSource',
    'LayerCoupling',
    'MemoryBank',
    'TurnoverMeter',
    'gather_rows',
    'map_layers',
    'nearest_neighbors',
    'neighbor_overlap',
]
