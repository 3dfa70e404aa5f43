# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a channel is worth, whatever the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from mmengine.dist import all_reduce
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..gates import StaticGate, force_gates
from ..runtime import Attachments, in_evaluation
from ..sites import Site

CRITERIA = ('l2', 'taylor', 'features', 'random')


def l2(network: nn.Module, site: Site) -> Tensor:
    """Length of the weights that make each channel, over the mean of the site: layers differ in
    scale.

    Args:
        network (nn.Module): The network that the site belongs to.
        site (Site): The site.

    Returns:
        Tensor: One value for each channel.
    """
    squares = torch.zeros(site.channels)
    for end in site.producers:
        layer: Any = network.get_submodule(end.module)
        weight = layer.weight.detach().float().cpu()
        weight = weight.transpose(0, 1) if getattr(layer, 'transposed', False) else weight
        each = weight.flatten(1).square().sum(dim=1)
        index = torch.arange(len(each)) if end.index is None else torch.tensor(end.index)
        squares.index_add_(0, index[index >= 0], each[index >= 0])
    lengths = squares.sqrt()
    return lengths / lengths.mean().clamp(min=1e-30)


def features(
    network: nn.Module,
    part: nn.Module,
    gates: Mapping[str, StaticGate],
    batches: Iterable[Any],
    run: Callable[[Any], Any],
    seed: int = 0,
) -> dict[str, Tensor]:
    """What the outputs of a part change by without each channel, to first order, squared; no label
    is needed.

    That is the squared length of the outputs' derivative by the channel's mask. A random direction
    for each picture gives it without one backward pass for each output: the squared slope along
    it has that length as its mean. Each map counts in units of its own size.

    Args:
        network (nn.Module): The network.
        part (nn.Module): The part of it whose outputs count.
        gates (Mapping[str, StaticGate]): The gates, by their names in the network.
        batches (Iterable): Batches of pictures.
        run (Callable): Runs the network, or that part, on a batch.
        seed (int): Of the directions. Defaults to 0.

    Returns:
        dict[str, Tensor]: Gate -> one value for each channel.
    """
    found: list[Tensor] = []
    attached, generator = Attachments(), torch.Generator().manual_seed(seed)
    attached.after(part, partial(_keep, found))

    def along(batch: Any) -> Tensor:
        found.clear()
        run(batch)
        total: Any = 0.0
        for out in found:
            direction = torch.randn(out.shape, generator=generator).to(out)
            size = out.detach().square().mean().sqrt().clamp(min=1e-20)
            total = total + (direction * out).sum() / (size * out[0].numel() ** 0.5)
        return total / len(found[0])

    try:
        return taylor(network, gates, batches, along)
    finally:
        attached.remove()


def _keep(into: list[Tensor], module: nn.Module, args: tuple, outs: Any) -> None:
    into.extend(out for out in tree_flatten(outs)[0] if isinstance(out, Tensor))


def taylor(
    network: nn.Module,
    gates: Mapping[str, StaticGate],
    batches: Iterable[Any],
    loss: Callable[[Any], Tensor],
) -> dict[str, Tensor]:
    """Squares of activation times gradient, of each channel: what the loss would change by without
    it, to first order ("Importance Estimation for Neural Network Pruning", Molchanov et al.).

    For a picture they are summed over the positions, then squared, then summed over pictures, and
    over all ranks. The network runs in evaluation, on the channels that are open now; no
    gradient of a parameter is touched.

    Args:
        network (nn.Module): The network.
        gates (Mapping[str, StaticGate]): The gates, by their names in it.
        batches (Iterable): Batches of training data.
        loss (Callable): Runs the network on a batch; the mean over its pictures.

    Returns:
        dict[str, Tensor]: Gate -> one value for each channel.
    """
    sums = {name: torch.zeros_like(gate.mask) for name, gate in gates.items()}
    masks = {name: gate.mask.clone().requires_grad_() for name, gate in gates.items()}
    with in_evaluation(network), torch.enable_grad(), force_gates(network, masks):
        for batch in batches:
            value = loss(batch)
            ran = {
                name: gate.record.mask for name, gate in gates.items() if gate.record is not None
            }
            slopes = torch.autograd.grad(value, list(ran.values()), allow_unused=True)
            for name, slope in zip(ran, slopes, strict=True):
                if slope is not None:
                    sums[name] += (len(slope) * slope).square().sum(dim=0)
    for total in sums.values():
        all_reduce(total)
    return {name: total.cpu() for name, total in sums.items()}
