# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The executed share of a backbone's MACs as a function of its gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import torch
import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from .layer_recorder import Call, LayerRecorder


class BackboneShare(LayerRecorder):
    """Watches the layers of a backbone and prices decisions of its gates.

    It counts as :class:`MACsTracer` does: gated layers by their open
    channels, everything else fully, the gates' own MACs on top, over the MACs of
    the same backbone without gates. In place of the masks of a pass it takes any
    openness, such as probabilities, and is differentiable in them. As decisions of two
    gates are independent given the image, probabilities give the expected share.

    Gates that decide several times in a pass, or for regions of the images, are priced
    decision by decision.

    Args:
        model (nn.Module): A model with gates.
        backbone (str): Name of the part that is the backbone; '' means the
            whole model. Defaults to 'backbone'.

    Example:
        >>> share = BackboneShare(detector)
        >>> share.attach()
        >>> detector(images)
        >>> share.of([gate.pass_record.probs.mean(dim=1) for gate in share.gates.values()])
        tensor([0.71, 0.64])
    """

    def __init__(self, model: nn.Module, backbone: str = 'backbone') -> None:
        super().__init__(model, backbone)
        self.layers = {name: kind for name, kind in self.layers.items() if kind[0]}
        self.gates = {
            name: gate
            for name, gate in self.gates.items()
            if any(gate is module for module in self.backbone.modules())
        }
        self._gated = [name for name in self.switches if name in self.layers]
        self._even = [name for name in self.layers if name not in self._gated]
        order = {name: number for number, name in enumerate(self.gates)}
        # Openness of a side: parts of its channels, each times that of the gates they follow.
        self._products: list[tuple[int, ...]] = []
        self._sides: dict[str, tuple[list[tuple[int, float]], ...]] = {}
        for name in self._gated:
            switch, sides = self.switches[name], []
            for side in (switch.ins, switch.outs):
                parts = []
                for owners, part in side.parts().items():
                    product = tuple(order[owner] for owner in owners)
                    if product not in self._products:
                        self._products.append(product)
                    parts.append((self._products.index(product), part))
                sides.append(parts)
            self._sides[name] = tuple(sides)
            groups = getattr(self._modules[name], 'groups', 1)
            if groups > 1 and switch.ins.ends and switch.outs.ends:
                raise UsageError(
                    f'{name!r} has {groups} groups and gates on both sides: its MACs depend on '
                    'which channels meet in a group, not on how many are open'
                )
        self._matrices: dict[tuple, Tensor] = {}
        self._macs: dict[str, float] = {}
        self._calls: dict[str, list[Call]] = {}
        self._batch = 0
        self._running = False

    def attach(self) -> None:
        """Start watching."""
        if not self._attached:
            super().attach()
            self._attached.before(self.backbone, self._begin)
            self._attached.after(self.backbone, self._end)

    def of(self, openness: Union[Tensor, Sequence[Tensor]]) -> Tensor:
        """The share of each image, at the image size of the last pass.

        Args:
            openness (Tensor | Sequence[Tensor]): B x gates, for each image and gate, in the
                order of ``self.gates``, the mean openness of its channels. Or for each gate
                one number for each of its decisions in the last pass, in their order. Gates that
                did not run may have any, for each image.

        Returns:
            Tensor: One share for each image; above 1 by the gates' own MACs if
            all is open. Of images whose regions differ in number it is that of the dense MACs
            of the mean image.
        """
        if isinstance(openness, Tensor):
            return self._sum(self._even) / self.dense() + self._of_images(openness, self._gated)
        dense, batch = self.dense(), self._batch
        images = torch.stack(
            [one if len(one) == batch else one.new_zeros(batch) for one in openness], dim=1
        )
        calls = self._calls
        once = [
            name
            for name in self._gated
            if len(calls.get(name, ())) == 1
            and calls[name][0].rows == batch
            and calls[name][0].owners is None
        ]
        even = [name for name in self._even if all(c.owners is None for c in calls.get(name, ()))]
        share = self._sum(even) / dense + self._of_images(images, once)
        done = {*once, *even}
        for name in calls:
            mine = [call for call in calls[name] if call.rows]
            if name in done or not mine:
                continue
            macs = torch.cat([images.new_full((c.rows,), c.macs / c.rows) for c in mine])
            for side in self._sides.get(name, ()):
                macs = macs * sum(part * self._product(openness, p) for p, part in side)
            owners = torch.cat([call.images(batch, images.device) for call in mine])
            share = share.index_add(0, owners, macs / dense)
        return share

    @property
    def images(self) -> int:
        """How many images the last pass was about."""
        return self._batch

    def _product(self, openness: Sequence[Tensor], number: int) -> Union[Tensor, float]:
        gates = self._products[number]
        return torch.stack([openness[gate] for gate in gates]).prod(dim=0) if gates else 1.0

    def _of_images(self, openness: Tensor, layers: list[str]) -> Tensor:
        """What gated layers execute of the dense MACs, for each row of openness."""
        ran = [name for name in layers if name in self._macs]
        if not ran:
            return openness.new_zeros(len(openness))
        dense = self.dense()
        macs = openness.new_tensor([self._macs[name] / dense for name in ran])
        ins, outs = (self._matrix(ran, side, openness) for side in (0, 1))
        one = torch.ones_like(openness[:, 0])
        products = torch.stack(
            [
                one if not product else openness[:, list(product)].prod(dim=1)
                for product in self._products
            ],
            dim=1,
        )
        return ((products @ ins) * (products @ outs)) @ macs

    def dense(self) -> float:
        """MACs of the last pass, for one image, of the backbone without gates."""
        dense = self._sum([name for name in self.layers if not self.layers[name][1]])
        if not dense:
            raise RuntimeError('the backbone has not run; run the model once after attach()')
        return dense

    def minimum(self, openness: float = 0.0) -> float:
        """The share with that part of each gate's channels open, by default none:
        what stem, shortcuts and the gates themselves cost.

        Args:
            openness (float): Open part of each gate. Defaults to 0.0.
        """
        return float(self.of(torch.full((1, len(self.gates)), openness)))

    def per_channel(self) -> dict[str, float]:
        """Gate -> MACs that one of its channels turns off per image while all others are open.

        A gate that did not run turns nothing off.
        """
        costs = {}
        for number, (name, gate) in enumerate(self.gates.items()):
            total = 0.0
            for layer in self._gated:
                if layer not in self._macs:
                    continue
                ins, outs = (
                    sum(part for product, part in side if number in self._products[product])
                    for side in self._sides[layer]
                )
                # One channel, so what both sides would turn off is counted once.
                total += self._macs[layer] * max(ins, outs)
            costs[name] = total / gate.channels
        return costs

    def _sum(self, names: list[str]) -> float:
        return sum(self._macs.get(name, 0.0) for name in names)

    def _matrix(self, layers: list[str], side: int, like: Tensor) -> Tensor:
        """Products x layers: the part of a layer's channels that follow a product."""
        key = (side, tuple(layers), like.dtype, like.device)
        if key in self._matrices:
            return self._matrices[key]
        matrix = torch.zeros(len(self._products), len(layers), dtype=like.dtype)
        for column, name in enumerate(layers):
            for product, part in self._sides[name][side]:
                matrix[product, column] += part
        self._matrices[key] = matrix.to(like.device)
        return self._matrices[key]

    def _on_layer(self, name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        if self._running:
            super()._on_layer(name, module, args, output)
            call = self.calls[-1]
            self._batch = self._batch or call.rows  # the first layer reads the images
            self._macs[name] = self._macs.get(name, 0.0) + call.macs / self._batch
            self._calls.setdefault(name, []).append(call)

    def _begin(self, *_: object) -> None:
        self.reset()
        self._macs.clear()
        self._calls.clear()
        self._batch = 0
        self._running = True

    def _end(self, *_: object) -> None:
        # A checkpointed layer runs again in the backward pass.
        self._running = False
