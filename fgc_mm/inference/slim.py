# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Slimming: what no image needs is removed for good."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from ..gates import Gate, find_gates
from ..runtime import Attachments
from ..sites import Gates
from ..sites.forward_hooks import add_gates, remove_gates
from ..sites.narrow import narrow, replace_tensor, source_mask
from ..sites.origin import Gating, InModel, example_of
from ..sites.site import Site


class GateUsage:
    """Counts how often each channel of each gate is open while a model runs.

    Args:
        model (nn.Module): A model with gates.

    Example:
        >>> usage = GateUsage(model)
        >>> usage.attach()
        >>> model(x)
        >>> usage.shares()['backbone.gates.layer1-0-conv1']
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
        """Gate -> share of its decisions in which each channel was open.

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
        model (nn.Module): The smaller model.
        networks (dict): Name of each network with gates in the model -> what
            :class:`~fgc_mm.nets.Gated` has to be told: ``widths``, site -> the channels that are
            left, where some are gone, and ``sites``, those that have a gate still.
        gates (list[dict]): For each gate ``gate`` (its name), ``channels``, ``removed`` and
            ``always_open`` (numbers of channels), and ``kept_because``, why nothing could be
            removed, None otherwise.
    """

    model: nn.Module
    networks: dict[str, dict[str, Any]] = field(default_factory=dict)
    gates: list[dict[str, Any]] = field(default_factory=list)


def slim(model: nn.Module, shares: dict[str, Tensor], tolerance: float = 0.0) -> Slimmed:
    """Leave out channels that are never open, and the gates of those that always are.

    Channels that are always open come to be open whatever the image; if that is all of a gate's,
    the gate goes. One channel of each site stays, with its gate. A site whose channels cannot be
    taken out keeps them all, and its gate goes on deciding over them.

    Args:
        model (nn.Module): A model with gates; it is not changed.
        shares (dict): Gate -> share of the images for which each channel is
            open, see :class:`GateUsage`.
        tolerance (float): Also remove channels open for at most this share.
            Defaults to 0.

    Returns:
        Slimmed: The smaller model, and what was done.

    Raises:
        UsageError: If there are no gates, or one cannot decide over fewer channels.
    """
    if not 0 <= tolerance < 1:
        raise UsageError(f'tolerance={tolerance} must be within [0, 1)')
    if not find_gates(model):
        raise UsageError(f'{type(model).__name__} has no gates, so nothing can be slimmed')
    slimmed = Slimmed(copy.deepcopy(model))
    containers = [n for n, m in slimmed.model.named_modules() if isinstance(m, Gates)]
    paths = {name: name.rpartition('.')[0] for name in containers}
    # All of them first: sites are found in a model without gates.
    taken = {name: remove_gates(slimmed.model.get_submodule(paths[name])) for name in containers}
    for name, gates in taken.items():
        _slim_network(slimmed, paths[name], name, gates, shares, tolerance)
    for name, gates in taken.items():
        if gates.sites:
            add_gates(slimmed.model.get_submodule(paths[name]), gates)
    return slimmed


def _slim_network(
    slimmed: Slimmed,
    path: str,
    container: str,
    gates: Gates,
    shares: dict[str, Tensor],
    tolerance: float,
) -> None:
    sites = list(gates.sites.values())
    names = {site.name: f'{container}.{gates.name_of(site.name)}' for site in sites}
    masks = {site: _kept(shares[gate], tolerance) for site, gate in names.items()}
    narrower, refused = _narrow(slimmed.model, path, gates, masks)
    masks.update((name, np.ones(gates.sites[name].channels, bool)) for name in refused)
    widths = {}
    for old, new in zip(sites, narrower, strict=True):
        mask, share = masks[old.name], shares[names[old.name]].cpu().numpy()
        always = share[mask] == 1
        slimmed.gates.append(
            dict(
                gate=names[old.name],
                channels=old.channels,
                removed=int((~mask).sum()),
                always_open=int(always.sum()),
                kept_because=refused.get(old.name),
            )
        )
        if new.channels < old.channels:
            widths[new.name] = new.channels
        if always.all():
            gates.drop(old.name)
        else:
            _slim_gate(gates.of(old.name), new, mask, always, source_mask(old, masks))
            gates.sites[old.name] = new
    slimmed.networks[path] = dict(widths=widths, sites=list(gates.sites))
    network = slimmed.model.get_submodule(path)
    gating = network.__dict__.get('gating')
    if isinstance(gating, Gating):
        known = {**gating.widths, **widths}
        network.__dict__['gating'] = replace(gating, widths=known, sites=list(gates.sites))


def _kept(share: Tensor, tolerance: float) -> np.ndarray:
    kept = share > tolerance
    if not kept.any():
        kept[share.argmax()] = True
    return kept.cpu().numpy()


def _narrow(
    model: nn.Module, path: str, gates: Gates, masks: dict[str, np.ndarray]
) -> tuple[list[Site], dict[str, str]]:
    """:func:`narrow` for a network, or in the model its sites were found in."""
    sites, example = list(gates.sites.values()), example_of(gates)
    if not isinstance(gates.example, InModel):
        return narrow(model.get_submodule(path), sites, masks, example)
    part = gates.example.part
    whole = model.get_submodule(path.removesuffix(part).rstrip('.'))
    wide = {f'{part}.{name}': mask for name, mask in masks.items()}
    found, refused = narrow(whole, [site.seen_from(part) for site in sites], wide, example)
    return (
        [site.seen_in(part) for site in found],
        {name.removeprefix(f'{part}.'): reason for name, reason in refused.items()},
    )


def _slim_gate(
    gate: Gate, site: Site, mask: np.ndarray, always: np.ndarray, inputs: np.ndarray
) -> None:
    """Have a gate decide over what is left."""
    device = next((t.device for t in gate.state_dict().values()), torch.device('cpu'))
    kept, fixed, read = (
        torch.as_tensor(part, device=device)
        for part in (mask.nonzero()[0], always, inputs.nonzero()[0])
    )
    for name, value in gate.slim_state(kept, fixed, read).items():
        owner, _, tensor = name.rpartition('.')
        module = gate.get_submodule(owner)
        if value.shape != getattr(module, tensor).shape:
            replace_tensor(module, tensor, value)
        else:
            getattr(module, tensor).data.copy_(value)
    gate.channels, gate.in_channels = site.channels, site.source_channels
