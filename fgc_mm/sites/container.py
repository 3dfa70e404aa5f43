# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The gates of a network: a child module that holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmengine.model import BaseModule
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import CheckpointError
from ..gates import Gate, build_gate
from .site import Site

NAME = 'gates'
"""Name of the child that holds the gates of a network."""


class Gates(BaseModule):
    """The gates of a network, by the names of their sites.

    They are a child of the network, named ``gates``. Hooks on the network's layers do the rest:
    before a site's source runs its gate decides, and before a consumer runs its input is
    masked. The network's own code and names stay as they are.

    Batch norms of the gates are in the mode of this module, whatever the network does to its own
    (``norm_eval``); :meth:`init_weights` of the network cannot wipe the gates' initial values.

    Args:
        sites (Sequence[Site]): The sites.
        gate (dict): Config of the gates, without their widths.
        follow_norm_eval (bool): Let the network put the gates' norms into evaluation as well.
            Defaults to False.
        frozen (Sequence[str]): Names of the sites whose gates do not learn. Defaults to ().

    Attributes:
        example: Outline of what the network can be called with, None if nobody knows.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        gate: dict,
        follow_norm_eval: bool = False,
        frozen: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.sites = {site.name: site for site in sites}
        self.follow_norm_eval = follow_norm_eval
        self.frozen = list(frozen)
        self.example: Any = None
        self.loaded = False
        self._register_state_dict_hook(_write_sites)
        for site in sites:
            built = build_gate(gate, site.source_channels, site.channels)
            built.block = site.source
            built.calls, built.regions = site.calls, site.regions
            self.add_module(self.name_of(site.name), built)
            if site.name in self.frozen:
                built.requires_grad_(False)

    @staticmethod
    def name_of(site: str) -> str:
        """Name of a site's gate in here: no dots are allowed."""
        return site.replace('.', '-')

    def of(self, site: str) -> Gate:
        """The gate of a site."""
        return getattr(self, self.name_of(site))

    def drop(self, site: str) -> None:
        """Be without the gate of a site."""
        del self.sites[site]
        delattr(self, self.name_of(site))
        self.frozen = [name for name in self.frozen if name != site]

    def train(self, mode: bool = True) -> Gates:
        """Set the mode, but not that of gates which do not learn."""
        super().train(mode)
        for name in self.frozen:
            self.of(name).eval()
        return self

    def forward(self, x: Any) -> Any:
        """Nothing: a network that is a ``nn.Sequential`` runs all of its children."""
        return x

    def init_weights(self) -> None:
        """The gates' own initial values, unless a checkpoint has brought others."""
        if not self.loaded:
            for gate in self.children():
                gate.reset_parameters()

    def keep_modes(self, *_: Any) -> None:
        """Hook before the network: undo what it did to the norms of its gates."""
        if self.follow_norm_eval:
            return
        for gate in self.children():
            if gate.training != self.training or any(
                isinstance(m, _BatchNorm) and m.training != self.training for m in gate.modules()
            ):
                gate.train(self.training)

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, local_metadata: dict, *args: Any
    ) -> None:
        check_same(self.sites.values(), local_metadata.get('sites') or {})
        self.loaded = self.loaded or any(key.startswith(prefix) for key in state_dict)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _write_sites(gates: Gates, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Hook after the state dict: what the gates decide over goes into its metadata."""
    local_metadata['sites'] = {name: fingerprint(site) for name, site in gates.sites.items()}


def fingerprint(site: Site) -> dict[str, Any]:
    """What a checkpoint says of a site: ``channels``, ``source``, ``consumers`` and ``digest``, of
    all layers it has to do with, their channels and connections."""
    graph = (
        site.source,
        site.source_channels,
        *(sorted(map(repr, ends)) for ends in (site.producers, site.through, site.consumers)),
        site.channels,
        site.axis,
        site.calls,
    )
    return dict(
        channels=site.channels,
        source=site.source,
        consumers=[end.module for end in site.consumers],
        digest=hashlib.sha256(repr(graph).encode()).hexdigest()[:16],
    )


def check_same(sites: Iterable[Site], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """See that gates of a checkpoint decide over what they were trained for.

    Args:
        sites (Iterable[Site]): The sites of the network.
        saved (Mapping): Site -> its fingerprint in the checkpoint. Sites that only one of both has
            are not looked at.
    """
    for site in sites:
        mine, theirs = fingerprint(site), saved.get(site.name)
        if theirs is None or theirs['digest'] == mine['digest']:
            continue
        raise CheckpointError(
            f'the checkpoint is of another network: its gate of {site.name!r} decides over '
            f'{_said(theirs)}, and here over {_said(mine)}; load it into the network it was '
            'trained in'
        )


def _said(found: Mapping[str, Any]) -> str:
    return (
        f'{found["channels"]} channels by the input of {found["source"]!r}, read by '
        f'{", ".join(found["consumers"])}'
    )
