# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .backbone_share import BackboneShare
from .formulas import conv_macs, linear_macs, macs_per_channel, open_share
from .gate_costs import GateCosts
from .gated_convs import GatedConv, block_sites, gated_convs
from .image_macs import ImageMACs
from .tracer import MACsTracer, count_macs

__all__ = [
    'BackboneShare',
    'GateCosts',
    'GatedConv',
    'ImageMACs',
    'MACsTracer',
    'block_sites',
    'conv_macs',
    'count_macs',
    'gated_convs',
    'linear_macs',
    'macs_per_channel',
    'open_share',
]
