# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .attach import Attachments, Callback
from .gate_costs import GateCosts
from .image_macs import ImageMACs
from .macs import conv_macs, linear_macs, macs_per_channel, open_share
from .plan import GatedConv, block_sites, gated_convs
from .share import BackboneShare
from .tracer import MACsTracer, count_macs

__all__ = [
    'Attachments',
    'BackboneShare',
    'Callback',
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
