# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Where a gate sits: the convolutions whose work it switches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GateSite:
    """One gate of a block and the convolutions it spares.

    All names are relative to the block, as in ``block.named_modules()``.

    Attributes:
        gate (str): Name of the gate.
        produces (tuple[str]): Convolutions whose output channels it switches.
        consumes (tuple[str]): Convolutions whose input channels it switches.
            A depthwise convolution between producer and consumer stands in
            both; its channels are counted once.
        norm (str): The last normalization before the mask; a closed channel
            need not be normalized either.
        norms (tuple[str]): The normalizations after the convolutions in
            ``produces``, in their order. Defaults to (), which means ``norm``
            alone.
    """

    gate: str
    produces: tuple[str, ...]
    consumes: tuple[str, ...]
    norm: str
    norms: tuple[str, ...] = ()
