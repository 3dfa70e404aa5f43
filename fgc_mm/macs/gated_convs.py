# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which gate switches which side of which convolution of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch.nn as nn

from ..errors import UsageError
from ..gates import Gate, GateSite
from ..sites import Gates
from .layers import is_conv


@dataclass(frozen=True)
class GatedConv:
    """A convolution and the gates of its two sides.

    Attributes:
        in_gate (str, optional): Name of the gate that switches its inputs.
        out_gate (str, optional): Name of the gate that switches its outputs.
    """

    in_gate: Optional[str] = None
    out_gate: Optional[str] = None


def block_sites(model: nn.Module) -> dict[str, list[GateSite]]:
    """The gate sites of a model, by block.

    Args:
        model (nn.Module): Any model.

    Returns:
        dict[str, list[GateSite]]: Name of the block as in
        ``model.named_modules()`` -> its sites, whose names are relative to it.

    Raises:
        UsageError: If a gate belongs to no site, so that nobody could tell
            what it spares.
    """
    sites = {}
    known: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, Gates):  # they know their sites themselves
            known.update(full_name(name, child) for child, _ in module.named_children())
        own = list(module.gate_sites()) if hasattr(module, 'gate_sites') else []
        if own:
            sites[name] = own
            known.update(full_name(name, site.gate) for site in own)
    for name, module in model.named_modules():
        if isinstance(module, Gate) and name not in known:
            raise UsageError(
                f'gate {name!r} of {type(model).__name__} is in no gate_sites() of its block, so '
                'the MACs it spares are unknown; list it there as a GateSite'
            )
    return sites


def gated_convs(block: nn.Module, sites: list[GateSite], prefix: str = '') -> dict[str, GatedConv]:
    """The convolutions of one block that its gates switch.

    Args:
        block (nn.Module): The block.
        sites (list[GateSite]): Its gate sites.
        prefix (str): Name of the block, put before all names in the result.
            Defaults to ''.

    Returns:
        dict[str, GatedConv]: Name of the convolution -> its gates.
    """
    in_gates: dict[str, str] = {}
    out_gates: dict[str, str] = {}
    for site in sites:
        for side, names in ((out_gates, site.produces), (in_gates, site.consumes)):
            for name in names:
                _check_conv(block, name, site.gate)
                if name in side:
                    raise UsageError(
                        f'{type(block).__name__}: gates {side[name]!r} and {site.gate!r} both '
                        f'claim the same side of {name!r}; one gate per side'
                    )
                side[name] = site.gate
    return {
        full_name(prefix, conv): GatedConv(
            in_gate=full_name(prefix, in_gates[conv]) if conv in in_gates else None,
            out_gate=full_name(prefix, out_gates[conv]) if conv in out_gates else None,
        )
        for conv in dict.fromkeys([*out_gates, *in_gates])
    }


def full_name(prefix: str, name: str) -> str:
    """Name of a submodule, seen from the model."""
    return f'{prefix}.{name}' if prefix else name


def _check_conv(block: nn.Module, name: str, gate: str) -> None:
    module = dict(block.named_modules()).get(name)
    if module is None or not is_conv(module):
        raise UsageError(
            f'{type(block).__name__}: gate {gate!r} names {name!r}, which is '
            f'{"missing" if module is None else "a " + type(module).__name__}; '
            'a GateSite names convolutions of its block'
        )
