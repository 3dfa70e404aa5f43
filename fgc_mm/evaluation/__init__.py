# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .gated_macs import GatedMACs, layer_rows
from .gated_macs_hook import GatedMACsHook, PredictionCounter
from .table import format_table

__all__ = ['GatedMACs', 'GatedMACsHook', 'PredictionCounter', 'format_table', 'layer_rows']
