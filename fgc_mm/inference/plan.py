# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How a batch is run through a gated block: which images together, on which
channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

# Costs in units of one MAC of a large convolution, for x86 cores with AVX2, adjusted by
# benchmarks/speed.py. They only decide between ways with the same result.
GATHER_ROWS = 30.0
"""Copying one weight, along with all others of its output channel."""
GATHER_COLUMNS = 70.0
"""Copying one weight that lies alone."""
PACK = 70.0
"""What a convolution does with each gathered weight before it computes: on small maps
it is most of the work. Where all channels are computed it was done before."""
TOUCH = 35.0
"""Reading and writing one value of a feature map."""
START = 4e6
"""Starting the operations that gather the weights of a convolution."""
CALL = 1.5e7
"""Running a block once more for another part of the batch."""
LANES = 8
"""Channels that are computed together: 63 take the time of 64."""

_MOST_KNOWN = 4096  # answers kept

Masks = Mapping[str, np.ndarray]


@dataclass
class ConvCost:
    """A convolution a gate switches.

    Attributes:
        in_channels (int): Its input channels, of one group.
        out_channels (int): Its output channels.
        kernel (int): Weights of one pair of channels.
        scale (float): Output positions / positions of the block input.
        in_gate (str, optional): Gate of its inputs. Defaults to None.
        out_gate (str, optional): Gate of its outputs. Defaults to None.
        depthwise (bool): Whether both are the same. Defaults to False.
    """

    in_channels: int
    out_channels: int
    kernel: int
    scale: float = 1.0
    in_gate: Optional[str] = None
    out_gate: Optional[str] = None
    depthwise: bool = False

    def weights(self, channels: Mapping[str, int]) -> int:
        """Weights between the channels that are computed."""
        outs = channels.get(self.out_gate or '', self.out_channels)
        if self.depthwise:
            return outs * self.kernel
        return outs * channels.get(self.in_gate or '', self.in_channels) * self.kernel

    def lanes(self, channels: Mapping[str, int]) -> int:
        """The same with outputs in whole groups of lanes."""
        outs = channels.get(self.out_gate or '', self.out_channels)
        return self.weights(channels) * (-(-outs // LANES) * LANES) // max(outs, 1)


@dataclass
class Part:
    """Images that are run together.

    Attributes:
        images (list[int], optional): Their numbers in the batch; None means
            all.
        channels (dict): Gate -> numbers of the channels to compute; a gate
            that is not named computes all.
        exact (bool): Whether just the open channels are computed, so that none
            has to be multiplied. Defaults to False, not known.
    """

    images: Optional[list[int]] = None
    channels: dict[str, np.ndarray] = field(default_factory=dict)
    exact: bool = False


@dataclass
class Planner:
    """Chooses the cheapest way to run a block on a batch.

    The ways are: every channel of all images (the mask is multiplied), the
    channels any image opens, and one part for each set of equal masks, which
    for different images is one part per image.

    Args:
        convs (list[ConvCost]): The convolutions the block's gates switch.
        granularity (int): Gathered channels are padded to a multiple of this; where
            that makes as many as there are, none are gathered. Defaults to 1.
        way (str): 'auto', or always 'dense', 'union' or 'groups'.
            Defaults to 'auto'.
    """

    convs: Sequence[ConvCost]
    granularity: int = 1
    way: str = 'auto'
    _known: dict[tuple, bool] = field(default_factory=dict, repr=False, compare=False)

    def plan(self, masks: Masks, positions: int) -> list[Part]:
        """The parts to run.

        Args:
            masks (Mapping): Gate -> B x C, nonzero where a channel is open.
            positions (int): Positions of the block input, H * W.
        """
        images = len(next(iter(masks.values())))
        if images == 1 and self.way == 'auto':
            return [self._single(masks, positions)]
        ways = {
            'dense': lambda: [Part()],
            'union': lambda: [self._part(masks, None)],
            'groups': lambda: self._groups(masks, images),
        }
        if self.way != 'auto':
            return ways[self.way]()
        best, least = [Part()], self.cost([Part()], images, positions)
        for way in ('union', 'groups') if images > 1 else ('union',):
            parts = ways[way]()
            cost = self.cost(parts, images, positions)
            if cost < least:
                best, least = parts, cost
        return best

    def cost(self, parts: Sequence[Part], images: int, positions: int) -> float:
        """What running these parts costs, in MACs."""
        total = 0.0
        for part in parts:
            count = images if part.images is None else len(part.images)
            channels = {gate: self.padded(len(index)) for gate, index in part.channels.items()}
            total += self._part_cost(channels, count * positions)
        if len(parts) > 1:
            out = self.convs[-1]
            total += CALL * len(parts) + TOUCH * images * positions * out.scale * out.out_channels
        return total

    def _part_cost(self, channels: Mapping[str, int], positions: int) -> float:
        """What one part costs that computes so many channels of the gates named."""
        total = 0.0
        for conv in self.convs:
            weights = conv.weights(channels)
            total += positions * conv.scale * conv.lanes(channels)
            if conv.out_gate in channels:
                total += START + (PACK + GATHER_ROWS) * weights
            if conv.in_gate in channels and not conv.depthwise:
                # Packed already if rows are gathered as well.
                total += START + (PACK if conv.out_gate not in channels else 0) * weights
                total += (GATHER_ROWS if conv.kernel == 1 else GATHER_COLUMNS) * weights
        return total

    def _single(self, masks: Masks, positions: int) -> Part:
        """The way of a single image, decided by numbers of channels."""
        channels = {}
        exact = True
        for gate, mask in masks.items():
            opened = int(np.count_nonzero(mask))
            count = self.padded(opened)
            if count < mask.shape[1]:
                channels[gate] = count
            elif opened < mask.shape[1]:
                exact = False
            exact = exact and mask.dtype == np.bool_
        if not channels:
            return Part(exact=exact)
        if self._pays(channels, positions):
            part = self._part(masks, None)
            part.exact = exact
            return part
        return Part()

    def _pays(self, channels: Mapping[str, int], positions: int) -> bool:
        """Whether an image is cheaper on so many channels than on all."""
        key = (positions, *channels.items(), *(conv.scale for conv in self.convs))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._part_cost(channels, positions) < self._part_cost({}, positions)
            self._known[key] = known
        return known

    def padded(self, channels: int) -> int:
        """How many channels are computed for so many."""
        return -(-channels // self.granularity) * self.granularity

    def _groups(self, masks: Masks, images: int) -> list[Part]:
        groups: dict[bytes, list[int]] = {}
        for i in range(images):
            key = b''.join((mask[i] != 0).tobytes() for mask in masks.values())
            groups.setdefault(key, []).append(i)
        if len(groups) == 1:
            return [self._part(masks, None)]
        return [self._part(masks, rows) for rows in groups.values()]

    def _part(self, masks: Masks, images: Optional[list[int]]) -> Part:
        part = Part(images)
        for gate, mask in masks.items():
            mask = mask if images is None else mask[images]
            chosen = np.flatnonzero(mask[0] if len(mask) == 1 else mask.any(axis=0))
            if self.padded(len(chosen)) < mask.shape[1]:
                part.channels[gate] = chosen
        return part
