# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Where the MACs of a network go, layer by layer."""

from __future__ import annotations

from typing import Any

from ..macs import MACsTracer


def layer_costs(tracer: MACsTracer, images: int) -> list[dict[str, Any]]:
    """Dense and executed MACs of every layer that ran.

    Args:
        tracer (MACsTracer): Who has counted.
        images (int): Of how many images.

    Returns:
        list[dict]: For each layer ``layer``, ``kind`` ('gated', 'plain', 'outside' of the
        backbone, 'gate' for what gates cost), ``dense`` and ``executed`` MACs per picture.
    """
    rows = []
    for name, (inside, own) in tracer.layers.items():
        if name not in tracer.by_layer:
            continue
        dense, executed = tracer.by_layer[name]
        kind = 'gated' if name in tracer.switches else 'plain'
        kind = 'gate' if own else kind if inside else 'outside'
        # Gates are no part of the dense network.
        dense = 0.0 if own else dense
        rows.append(dict(layer=name, kind=kind, dense=dense / images, executed=executed / images))
    return rows
