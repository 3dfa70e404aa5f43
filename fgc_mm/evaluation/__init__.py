# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .dial import ThresholdDial, calibration_batches
from .gated_macs import GatedMACs, gate_row, layer_rows
from .gated_macs_hook import GatedMACsHook, PredictionCounter, counted_backbone, read_macs

__all__ = [
    'GatedMACs',
    'GatedMACsHook',
    'PredictionCounter',
    'ThresholdDial',
    'calibration_batches',
    'counted_backbone',
    'gate_row',
    'layer_rows',
    'read_macs',
]
