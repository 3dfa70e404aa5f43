# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Where the MACs of a network go, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ..gates import find_gates
from ..macs import ImageMACs, Switch, open_share, switches_of
from ..macs.layers import call_macs, is_counted
from ..runtime import Attachments


class LayerCosts:
    """Counts dense and executed MACs of every layer while a model runs.

    The decisions come with the :class:`~fgc_mm.macs.ImageMACs` of the
    same pictures, so the sums over the layers are those of the images.

    Args:
        model (nn.Module): A task model.
        backbone (str): Name of the part that is the backbone; '' for all.
            Defaults to 'backbone'.
    """

    def __init__(self, model: nn.Module, backbone: str = 'backbone') -> None:
        self._modules = {n: m for n, m in model.named_modules() if is_counted(m)}
        self._plans = switches_of(model)
        everything = dict(model.named_modules())
        inside = {id(m) for m in everything[backbone].modules()}
        in_gates = {id(m) for gate in find_gates(model).values() for m in gate.modules()}
        self._kinds = {
            name: _kind(name in self._plans, id(m) in in_gates, id(m) in inside)
            for name, m in self._modules.items()
        }
        self._attached = Attachments()
        self._calls: dict[str, list[int]] = {}
        self._sums: dict[str, list[float]] = {}
        self._images = 0

    def attach(self) -> None:
        """Start counting."""
        for name, module in self._modules.items():
            self._attached.after(module, partial(self._on_layer, name))

    def detach(self) -> None:
        """Stop counting."""
        self._attached.remove()

    def settle(self, images: Sequence[ImageMACs]) -> None:
        """Take over the layers that ran since the last time."""
        decisions = [image.masks() for image in images]
        for name, calls in self._calls.items():
            dense = float(sum(calls))
            plan = self._plans.get(name)
            share = 1.0 if plan is None else self._share(name, plan, decisions, calls)
            sums = self._sums.setdefault(name, [0.0, 0.0])
            # Gates are no part of the dense network.
            sums[0] += 0.0 if self._kinds[name] == 'gate' else dense
            sums[1] += dense * share
        self._calls = {}
        self._images += len(images)

    def rows(self) -> list[dict[str, Any]]:
        """For each layer ``layer``, ``kind``, ``dense`` and ``executed`` MACs per picture."""
        order = [name for name in self._modules if name in self._sums]
        return [
            dict(
                layer=name,
                kind=self._kinds[name],
                dense=self._sums[name][0] / self._images,
                executed=self._sums[name][1] / self._images,
            )
            for name in order
        ]

    def _share(
        self, name: str, plan: Switch, decisions: list[dict[str, Any]], calls: list[int]
    ) -> float:
        """Executed part of a layer's calls, over pictures and passes."""
        gates = {gate for gate, _ in (*plan.ins.ends, *plan.outs.ends)}
        masks = {
            gate: torch.stack([torch.from_numpy(image[gate]) for image in decisions])
            for gate in gates
        }
        shape = next(iter(masks.values())).shape[:2]
        flat = {gate: mask.flatten(0, 1) for gate, mask in masks.items()}
        groups = getattr(self._modules[name], 'groups', 1)
        shares = open_share(plan.ins.mask(flat), plan.outs.mask(flat), groups)
        shares = shares.view(shape).mean(dim=0)  # by pass
        if len(shares) != len(calls):
            return float(shares.mean())
        weights = torch.tensor(calls, dtype=shares.dtype)
        return float((shares * weights).sum() / weights.sum())

    def _on_layer(self, name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        self._calls.setdefault(name, []).append(call_macs(module, args, output))


def _kind(gated: bool, gate: bool, backbone: bool) -> str:
    if gate:
        return 'gate'
    if not backbone:
        return 'outside'
    return 'gated' if gated else 'plain'
