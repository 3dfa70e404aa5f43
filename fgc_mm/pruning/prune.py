# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Closing the channels of static gates until the network has a given cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from ..gates import StaticGate
from ..macs import BackboneShare
from ..runtime import in_evaluation
from ..sites import Gates
from .criteria import CRITERIA, features, l2, taylor


def prune(
    network: nn.Module,
    criterion: str,
    target: float,
    batches: Iterable[Any],
    loss: Optional[Callable[[Any], Tensor]] = None,
    floor: float = 0.1,
    backbone: str = '',
    seed: int = 0,
) -> float:
    """Close channels of a network's static gates: those that are worth least for their MACs.

    Args:
        network (nn.Module): A network, gated with ``gate=dict(type='StaticGate')``.
        criterion (str): What a channel is worth: ``'l2'``, the length of the weights that make
            it; ``'taylor'``, what the loss says, see :func:`taylor`; ``'features'``, what the
            outputs of ``backbone`` say, without labels, see :func:`features`; ``'random'``.
        target (float): Share of the MACs to execute, within (0, 1].
        batches (Iterable): Batches; for ``'taylor'`` and ``'features'`` some of the training data,
            for the others the first one only tells the size of pictures.
        loss (Callable, optional): Runs the network on a batch and gives the mean loss; only
            ``'taylor'`` looks at it. Defaults to None: the network itself, on a batch.
        floor (float): Least share of open channels of each gate. Defaults to 0.1; one
            channel is open in any case.
        backbone (str): Name of the part of the network that the share is about.
            Defaults to '', all of it.
        seed (int): Seed of ``'random'`` and ``'features'``. Defaults to 0.

    Returns:
        float: The share that the network executes now.

    Example:
        >>> network = fgc_mm.gate(network, images, gate=dict(type='StaticGate'))
        >>> prune(network, 'l2', target=0.5, batches=[images])
        0.4996
    """
    if criterion not in CRITERIA:
        raise UsageError(f'criterion={criterion!r} must be one of {CRITERIA}')
    if not 0 < target <= 1:
        raise UsageError(f'target={target!r} must be within (0, 1], the share of MACs to execute')
    if not 0 <= floor < 1:
        raise UsageError(f'floor={floor!r} must be within [0, 1)')
    prices = BackboneShare(network, backbone)
    gates = {name: g for name, g in prices.gates.items() if isinstance(g, StaticGate)}
    if not gates or len(gates) < len(prices.gates):
        other = next((f', and {n} is a {type(g).__name__}' for n, g in prices.gates.items()), '')
        raise UsageError(
            f'{type(network).__name__} must have static gates{other}; gate it with '
            "gate=dict(type='StaticGate')"
        )
    run = loss or network
    prices.attach()
    try:
        if criterion == 'taylor':
            scores = taylor(network, gates, batches, run)
        elif criterion == 'features':
            scores = features(network, prices.backbone, gates, batches, run, seed)
        else:
            with torch.no_grad(), in_evaluation(network):
                run(next(iter(batches)))
            scores = _scores(network, gates, criterion, seed)
    finally:
        prices.detach()
    masks = _allocate(scores, prices, target, floor)
    for name, gate in gates.items():
        gate.mask.copy_(masks[name])
    return _share(masks, prices)


def _scores(
    network: nn.Module, gates: Mapping[str, StaticGate], criterion: str, seed: int
) -> dict[str, Tensor]:
    if criterion == 'random':
        generator = torch.Generator().manual_seed(seed)
        return {n: torch.rand(gate.channels, generator=generator) for n, gate in gates.items()}
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, Gates):
            inner = network.get_submodule(name.rpartition('.')[0])
            for site in module.sites.values():
                full = f'{name}.{module.name_of(site.name)}'.lstrip('.')
                found[full] = l2(inner, site)
    return {name: found[name] for name in gates}


def _share(masks: Mapping[str, Tensor], prices: BackboneShare) -> float:
    return float(prices.of(torch.stack([masks[name].mean() for name in prices.gates])[None]))


def _allocate(
    scores: Mapping[str, Tensor], prices: BackboneShare, target: float, floor: float
) -> dict[str, Tensor]:
    """Close the channels of least score for their MACs, over all gates, until the target.

    Args:
        scores (Mapping[str, Tensor]): Gate -> what each of its channels is worth.
        prices (BackboneShare): Prices decisions, at the size of pictures it has seen.
        target (float): The share.
        floor (float): Least open part of each gate.

    Returns:
        dict[str, Tensor]: Gate -> its mask.
    """
    costs = prices.per_channel()
    order: list[tuple[float, str, int]] = []
    for name, score in scores.items():
        kept = max(1, math.ceil(floor * len(score)))
        for channel in score.argsort()[: len(score) - kept].tolist():
            if costs[name]:
                order.append((float(score[channel]) / costs[name], name, channel))
    order.sort()

    def closed(number: int) -> dict[str, Tensor]:
        masks = {name: torch.ones_like(score) for name, score in scores.items()}
        for _, name, channel in order[:number]:
            masks[name][channel] = 0
        return masks

    least = _share(closed(len(order)), prices)
    if least > target:
        raise UsageError(
            f'target={target:g} cannot be reached: with {floor:g} of each gate open the network '
            f'executes {least:.3f} of its MACs; choose a target above that, or a lower floor'
        )
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if _share(closed(middle), prices) > target:
            low = middle + 1
        else:
            high = middle
    # The last one closed may be large: with or without it, whichever is closer.
    return min(
        (closed(n) for n in (max(0, low - 1), low)),
        key=lambda masks: abs(_share(masks, prices) - target),
    )
