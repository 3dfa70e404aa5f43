# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A place in a network where channels can be switched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np
import torch
from torch import Tensor

Index = Optional[tuple[int, ...]]
"""For each channel the number of the decision it follows, -1 where it follows none; None means
decision i for channel i."""


def numbers(index: Index, channels: int) -> np.ndarray:
    """An index as an array, for a number of decisions."""
    return np.arange(channels) if index is None else np.asarray(index)


def follow(index: np.ndarray, decisions: np.ndarray, channels: int) -> Index:
    """The index of channels whose decisions follow others.

    Args:
        index (np.ndarray): The decision of each channel, -1 for none.
        decisions (np.ndarray): What each of these decisions follows, -1 for none.
        channels (int): How many there are to follow.
    """
    found = np.where(index < 0, -1, decisions[np.maximum(index, 0)])
    return None if np.array_equal(found, np.arange(channels)) else tuple(found.tolist())


def is_in(name: str, part: str) -> bool:
    """Whether a module belongs to a part of a model."""
    return name == part or name.startswith(f'{part}.')


@dataclass(frozen=True)
class End:
    """A layer that makes or reads the channels of a site.

    Attributes:
        module (str): Path of the layer in the network.
        index (tuple[int], optional): The decisions of its output channels (a producer, a layer in
            between) or input channels (a consumer).
    """

    module: str
    index: Index = None

    def spread(self, decisions: Tensor) -> Tensor:
        """Decisions as one number for each channel of the layer.

        Args:
            decisions (Tensor): B x decisions.

        Returns:
            Tensor: B x channels; 1 where a channel follows no decision.
        """
        if self.index is None:
            return decisions
        index = torch.tensor(self.index, device=decisions.device)
        spread = decisions.index_select(1, index.clamp(min=0))
        return torch.where(index < 0, torch.ones_like(spread), spread)

    @property
    def offset(self) -> int:
        """Number of the first channel that follows a decision."""
        return 0 if self.index is None else int(np.argmax(np.asarray(self.index) >= 0))


@dataclass(frozen=True)
class Scale:
    """A parameter or buffer with an entry for each channel, between producers and consumers.

    Weights of a batch norm and its statistics, slopes of a PReLU, a layer scale.

    Attributes:
        tensor (str): Its name in the network.
        dim (int): The dimension with the channels.
        index (tuple[int], optional): As in :class:`End`, along that dimension.
    """

    tensor: str
    dim: int
    index: Index = None


@dataclass(frozen=True)
class Site:
    """Channels between the layers that make them and those that read them.

    Nothing but per-channel steps lies between, and nothing else reads them. So a closed channel
    is exactly irrelevant: neither the work that makes it nor the weights that read it are needed.

    Attributes:
        source (str): Path of the module whose input the gate reads.
        source_channels (int): Channels of that input.
        producers (tuple[End]): Layers whose output channels are switched; the first gives the site
            its name.
        through (tuple[End]): Grouped and depthwise convolutions in between, by their outputs.
        consumers (tuple[End]): Layers whose input channels are switched.
        channels (int): Number of decisions.
        axis (int): Where the channels of the source's input are: 1 for maps, -1 for tokens.
        calls (int): How often it decides in a pass.
        scales (tuple[Scale]): Parameters and buffers in between with an entry for each channel,
            but those of the layers above.
        reads (tuple[End]): Sites whose channels the gate reads in the source's input: ``module`` is
            the name of such a site, ``index`` is over the channels of that input. A closed
            one is zero there too.
        regions (bool): Whether the rows of that input are regions of pictures, not pictures.
    """

    source: str
    source_channels: int
    producers: tuple[End, ...]
    through: tuple[End, ...]
    consumers: tuple[End, ...]
    channels: int
    axis: int = 1
    calls: int = 1
    scales: tuple[Scale, ...] = ()
    reads: tuple[End, ...] = ()
    regions: bool = False

    @property
    def name(self) -> str:
        """Path of the first producer."""
        return self.producers[0].module

    def seen_from(self, path: str) -> Site:
        """The same site, with names as seen from a model that has the network at a path."""
        return self._renamed(lambda name: '.'.join(filter(None, (path, name))))

    def seen_in(self, part: str) -> Site:
        """The same site, all of it in one part of the network, with names as seen from there."""
        reads = tuple(end for end in self.reads if is_in(end.module, part))
        return replace(self, reads=reads)._renamed(lambda name: name[len(part) + 1 :])

    def _renamed(self, rename: Callable[[str], str]) -> Site:
        def ends(several: tuple[End, ...]) -> tuple[End, ...]:
            return tuple(replace(end, module=rename(end.module)) for end in several)

        return replace(
            self,
            source=rename(self.source),
            producers=ends(self.producers),
            through=ends(self.through),
            consumers=ends(self.consumers),
            scales=tuple(replace(scale, tensor=rename(scale.tensor)) for scale in self.scales),
            reads=ends(self.reads),
        )

    def __str__(self) -> str:
        return f'{self.name} -> {", ".join(end.module for end in self.consumers)}'


@dataclass(frozen=True)
class Refusal:
    """A layer whose channels cannot be switched.

    Attributes:
        name (str): Its path.
        reason (str): Why, in a sentence that names the operation or module.
    """

    name: str
    reason: str
