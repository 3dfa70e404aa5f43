# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a channel of each gate costs, at the image size of the last pass."""

from __future__ import annotations

from functools import partial

import torch.nn as nn
from torch import Tensor

from ..runtime import Attachments
from .formulas import macs_per_channel
from .gated_convs import block_sites, full_name, gated_convs
from .layers import call_macs


class GateCosts:
    """Watches a model and tells the MACs each gate channel turns off.

    Args:
        model (nn.Module): A model with gates.

    Example:
        >>> costs = GateCosts(model)
        >>> costs.attach()
        >>> model(x)
        >>> costs.per_channel()
        {'layer1.0.gate1': 231211008.0, ...}
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._sites = block_sites(model)
        self._dense: dict[str, float] = {}
        self._attached = Attachments()

    def attach(self) -> None:
        """Start watching the gated convolutions."""
        for block, sites in self._sites.items():
            for conv in gated_convs(self._modules[block], sites, block):
                self._attached.after(self._modules[conv], partial(self._on_conv, conv))

    def detach(self) -> None:
        """Stop watching."""
        self._attached.remove()

    def per_channel(self) -> dict[str, float]:
        """Name of the gate -> MACs one of its channels turns off per image.

        Raises:
            RuntimeError: If the model has not run yet.
        """
        costs = {}
        for block, sites in self._sites.items():
            dense = {
                conv: self._macs_of(full_name(block, conv))
                for site in sites
                for conv in (*site.produces, *site.consumes)
            }
            for site in sites:
                name = full_name(block, site.gate)
                costs[name] = macs_per_channel(site, dense, self._modules[name].channels)
        return costs

    def _macs_of(self, conv: str) -> float:
        if conv not in self._dense:
            raise RuntimeError(
                f'the gated convolution {conv!r} has not run, so the MACs of its channels are '
                'unknown; run the model once after attach()'
            )
        return self._dense[conv]

    def _on_conv(self, name: str, conv: nn.Module, args: tuple, output: Tensor) -> None:
        macs = call_macs(conv, args, output)
        self._dense[name] = macs / output.size(0)
