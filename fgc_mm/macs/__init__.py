# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .backbone_share import BackboneShare
from .formulas import call_macs, open_share
from .image_macs import ImageMACs
from .site_shares import layer_macs, share_left, share_touched
from .switches import Side, Switch, switches_of
from .tracer import MACsTracer, count_macs

__all__ = [
    'BackboneShare',
    'ImageMACs',
    'MACsTracer',
    'Side',
    'Switch',
    'call_macs',
    'count_macs',
    'layer_macs',
    'open_share',
    'share_left',
    'share_touched',
    'switches_of',
]
