# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .approximate import ApproximateSearch
from .contrast import contrast_loss
from .layer_coupling import CouplingResult, LayerCoupling
from .memory_bank import MemoryBank
from .neighbors import ExactSearch, LabelSource, nearest_neighbours
from .overlap import TurnoverMeter, neighbour_overlap, neighbour_turnover
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
    'nearest_neighbours',
    'neighbour_overlap',
    'neighbour_turnover',
    'with_gradient',
]
