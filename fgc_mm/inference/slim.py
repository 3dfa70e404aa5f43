# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Slimming: what no image needs is removed for good."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError
from ..gates import Gate, GateSite, find_gates
from ..macs import GatedConv, gated_convs
from ..nets import GatedBackbone, GatedBlock
from ..runtime import Attachments
from .forwards import is_depthwise, is_plain_conv


class GateUsage:
    """Counts how often each channel of each gate is open while a model runs.

    Args:
        model (nn.Module): A model with gates.

    Example:
        >>> usage = GateUsage(model)
        >>> usage.attach()
        >>> model(x)
        >>> usage.shares()['layer1.0.gate1']
        tensor([0.5000, 1.0000, 0.0000, ...])
    """

    def __init__(self, model: nn.Module) -> None:
        self._gates = find_gates(model)
        self._open = {name: torch.zeros(gate.channels) for name, gate in self._gates.items()}
        self._passes = dict.fromkeys(self._gates, 0)
        self._attached = Attachments()

    def attach(self) -> None:
        """Start counting."""
        for name, gate in self._gates.items():
            self._attached.after(gate, partial(self._count, name))

    def detach(self) -> None:
        """Stop counting."""
        self._attached.remove()

    def shares(self) -> dict[str, Tensor]:
        """Gate -> share of the images for which each channel was open.

        Raises:
            UsageError: If a gate has decided for no image.
        """
        for name, passes in self._passes.items():
            if not passes:
                raise UsageError(f'gate {name!r} has decided for no image: the set has none')
        return {name: count / self._passes[name] for name, count in self._open.items()}

    def _count(self, name: str, gate: Gate, *_: Any) -> None:
        assert gate.record is not None
        is_open = gate.record.mask != 0
        self._open[name] += is_open.sum(dim=0).cpu()
        self._passes[name] += is_open.size(0)


@dataclass
class Slimmed:
    """What is left of a model.

    Attributes:
        state_dict (dict): Its weights.
        backbones (dict): Name of each gated backbone in the model -> config
            values it has to be built with.
        gates (list[dict]): For each gate ``gate`` (its name), ``channels``,
            ``removed`` and ``always_open`` (numbers of channels).
    """

    state_dict: dict[str, Tensor]
    backbones: dict[str, dict[str, Any]] = field(default_factory=dict)
    gates: list[dict[str, Any]] = field(default_factory=list)


def slim(model: nn.Module, shares: dict[str, Tensor], tolerance: float = 0.0) -> Slimmed:
    """Leave out channels that are never open, and the gates of those that always are.

    Channels that are always open come to be open whatever the image; if that
    is all of a gate's, the gate goes. One channel of each convolution stays,
    with its gate. Channels of a depthwise convolution that reads the block
    input itself cannot be removed.

    Args:
        model (nn.Module): A model with gated backbones; it is not changed.
        shares (dict): Gate -> share of the images for which each channel is
            open, see :class:`GateUsage`.
        tolerance (float): Also remove channels open for at most this share.
            Defaults to 0.

    Returns:
        Slimmed: Weights and config values of the smaller model.

    Raises:
        UsageError: If there are no gates, or a gated layer cannot be slimmed.
    """
    if not 0 <= tolerance < 1:
        raise UsageError(f'tolerance={tolerance} must be within [0, 1)')
    backbones = {n: m for n, m in model.named_modules() if isinstance(m, GatedBackbone)}
    backbones = {name: backbone for name, backbone in backbones.items() if find_gates(backbone)}
    if not backbones:
        raise UsageError(
            f'{type(model).__name__} has no gated backbone with gates, so nothing can be slimmed'
        )
    result = Slimmed(dict(model.state_dict()))
    for name, backbone in backbones.items():
        result.backbones[name] = _slim_backbone(name, backbone, shares, tolerance, result)
    return result


def _slim_backbone(
    name: str,
    backbone: GatedBackbone,
    shares: dict[str, Tensor],
    tolerance: float,
    result: Slimmed,
) -> dict[str, Any]:
    prefix = f'{name}.' if name else ''
    widths, gated = dict(backbone.widths), []
    for block_name in backbone.block_names:
        block = backbone.get_submodule(block_name)
        assert isinstance(block, GatedBlock)
        convs = gated_convs(block, block.gate_sites())
        for site in block.gate_sites():
            gate = f'{prefix}{block_name}.{site.gate}'
            share = shares[gate]
            kept = _kept(share, tolerance, _removable(block, convs, site, gate))
            always = share[kept] == 1
            _cut(result.state_dict, f'{prefix}{block_name}.', block, site, kept, always)
            conv = f'{block_name}.{backbone.conv_of(site.gate)}'
            if len(kept) < len(share):
                widths[conv] = len(kept)
            if not bool(always.all()):
                gated.append(conv)
            result.gates.append(
                dict(
                    gate=gate,
                    channels=len(share),
                    removed=len(share) - len(kept),
                    always_open=int(always.sum()),
                )
            )
    if not gated:
        return dict(gate=None, gated_blocks='all', gated_convs=None, widths=widths)
    return dict(gated_convs=gated, widths=widths)


def _kept(share: Tensor, tolerance: float, removable: bool) -> Tensor:
    if not removable:
        return torch.arange(len(share))
    kept = (share > tolerance).nonzero().flatten()
    return kept if len(kept) else share.argmax()[None]


def _removable(block: GatedBlock, convs: dict[str, GatedConv], site: GateSite, gate: str) -> bool:
    """Whether channels of a gate can be cut out of its layers."""
    grouped = []
    for name in {*site.produces, *site.consumes}:
        conv = block.get_submodule(name)
        if not isinstance(conv, nn.Conv2d) or not is_plain_conv(conv):
            raise UsageError(f'{gate}: {name} is a {type(conv).__name__} and cannot be slimmed')
        if conv.groups > 1:
            grouped.append(name)
            if not is_depthwise(conv, convs[name]):
                raise UsageError(f'{gate}: {name} has groups={conv.groups}, cannot be slimmed')
    for name in site.norms:
        norm = block.get_submodule(name)
        if not isinstance(norm, _BatchNorm):
            raise UsageError(f'{gate}: {name} is a {type(norm).__name__} and cannot be slimmed')
    return not set(site.produces) <= set(grouped)


def _cut(
    state: dict[str, Tensor],
    prefix: str,
    block: GatedBlock,
    site: GateSite,
    kept: Tensor,
    always: Tensor,
) -> None:
    """Take the kept channels of everything around a gate."""
    device = next(iter(state.values())).device
    kept, always = kept.to(device), always.to(device)
    for name in (*site.produces, *site.norms):
        for key in ('weight', 'bias', 'running_mean', 'running_var'):
            if f'{prefix}{name}.{key}' in state:
                state[f'{prefix}{name}.{key}'] = state[f'{prefix}{name}.{key}'][kept]
    for name in set(site.consumes) - set(site.produces):
        state[f'{prefix}{name}.weight'] = state[f'{prefix}{name}.weight'][:, kept]
    gate = block.gates()[site.gate]
    own = f'{prefix}{site.gate}.'
    for key in [key for key in state if key.startswith(own)]:
        del state[key]
    if not bool(always.all()):
        state.update({own + key: value for key, value in gate.slim_state(kept, always).items()})
