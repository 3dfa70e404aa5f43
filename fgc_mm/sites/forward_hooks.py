# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Forward hooks that have the gates of a network decide, and mask what its layers read.

The network knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
import torch.nn as nn
import torch.utils.checkpoint as checkpoint
from torch import Tensor

from ..errors import UsageError
from ..gates.missing_keys import report_missing
from .container import NAME, Gates
from .layers import channel_axis
from .site import End, Site


class Decide:
    """Hook before a source: its gates decide on its input.

    Args:
        gates (Gates): The gates of the network.
        sites (Sequence[str]): Names of the sites with this source.
        axis (int): Where the channels of the input are: 1, or -1 for tokens.
    """

    def __init__(self, gates: Gates, sites: Sequence[str], axis: int) -> None:
        self.gates = gates
        self.sites = list(sites)
        self.axis = axis

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        pooled: dict[Any, Tensor] = {}
        for name in self.sites:
            gate = self.gates.of(name)
            kind = type(gate).pool
            if kind not in pooled:
                pooled[kind] = self._without_closed(gate.pool(as_map(x, self.axis)), name)
            gate.multiplier = gate(pooled[kind])

    def _without_closed(self, pooled: Tensor, name: str) -> Tensor:
        """What is closed in the input is closed for gates as well."""
        for end in self.gates.sites[name].reads:
            if end.module in self.gates.sites:
                multiplier = self.gates.of(end.module).multiplier
                if multiplier is not None:
                    pooled = pooled * end.spread(multiplier).to(pooled.dtype)
        return pooled


class Mask:
    """Hook before a consumer: closed channels of its input become zero.

    Args:
        gates (Gates): The gates of the network.
        ends (Mapping[str, End]): Site -> the channels this layer reads of it.
        axis (int): Where the channels of its input are, from the end.
        notes (Sequence[str]): The sites whose feature is noted here, if somebody asks for it.
    """

    def __init__(
        self, gates: Gates, ends: Mapping[str, End], axis: int, notes: Sequence[str]
    ) -> None:
        self.gates = gates
        self.ends = dict(ends)
        self.axis = axis
        self.notes = list(notes)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> Optional[tuple]:
        x = args[0] if args else next(iter(kwargs.values()))
        factor: Optional[Tensor] = None
        for name, end in self.ends.items():
            gate = self.gates.of(name)
            decided = gate.multiplier
            if decided is None:
                continue
            if name in self.notes and gate.wants_feature:
                gate.note_feature(self._feature(x, end, gate.channels))
            spread = end.spread(decided)
            factor = spread if factor is None else factor * spread
        if factor is None:
            return None
        masked = x * self._beside(factor.to(x.dtype), x)
        if args:
            return (masked, *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: masked}

    def _beside(self, factor: Tensor, x: Tensor) -> Tensor:
        """B x C in the shape that multiplies the input."""
        shape = [1] * x.dim()
        shape[0], shape[self.axis] = factor.shape
        return factor.view(shape)

    def _feature(self, x: Tensor, end: End, channels: int) -> Tensor:
        """B x decisions, the mean of the feature over positions and the channels of a decision."""
        dims = [d for d in range(1, x.dim()) if d != x.dim() + self.axis]
        with torch.no_grad():
            mean = x.detach().float()
            mean = mean.mean(dim=dims) if dims else mean
            if end.index is None:
                return mean
            index = torch.tensor(end.index, device=x.device)
            kept = index >= 0
            total = mean.new_zeros(mean.size(0), channels).index_add_(1, index[kept], mean[:, kept])
            count = torch.bincount(index[kept], minlength=channels).clamp(min=1)
            return total / count


def as_map(x: Tensor, axis: int) -> Tensor:
    """Any input in the shape of a batch of maps: B x C x H x W."""
    if axis == -1:
        x = x.movedim(-1, 1)
    if x.dim() == 2:
        return x[:, :, None, None]
    if x.dim() == 3:
        return x.unsqueeze(-1)
    return x if x.dim() == 4 else x.flatten(3)


class InitAfter:
    """``init_weights`` of a network, and after it that of its gates."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self) -> None:
        handle = self.network.register_load_state_dict_post_hook(report_missing)
        try:
            type(self.network).init_weights(self.network)  # type: ignore[attr-defined]
        finally:
            handle.remove()
        getattr(self.network, NAME).init_weights()


class NotReentrant:
    """Hooks around a network: parts it checkpoints are not run by a backward pass of their own.

    Such a backward pass would walk through the gates, which are outside of the part, once for
    every part.
    """

    def __init__(self) -> None:
        self.before: list[Any] = []

    def enter(self, *_: Any) -> None:
        """Before the forward pass."""
        self.before.append(checkpoint.CheckpointFunction)
        checkpoint.CheckpointFunction = _OnePass  # type: ignore[misc, assignment]

    def leave(self, *_: Any) -> None:
        """After it, and after an error in it."""
        checkpoint.CheckpointFunction = self.before.pop()  # type: ignore[misc]


class _OnePass:
    """What a checkpoint calls, whoever imported ``checkpoint`` from where."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve
        )


_CHECKPOINTS = ('with_cp', 'grad_checkpointing', 'use_checkpoint', 'gradient_checkpointing')
"""What modules call it that they checkpoint."""


def gate_sites(
    network: nn.Module, sites: Sequence[Site], gate: dict, follow_freeze: bool = False
) -> Gates:
    """Put gates on sites of a network.

    Args:
        network (nn.Module): The network; it gets a child ``gates`` and hooks on its layers.
        sites (Sequence[Site]): Some of those :func:`find_sites` found in it.
        gate (dict): Config of the gates.
        follow_freeze (bool): Gates of layers that do not learn do not either, and the network may
            put the gates' norms into evaluation. Defaults to False.

    Returns:
        Gates: The gates.

    Raises:
        UsageError: If there is no site, or the network has something called ``gates``.
    """
    if not sites:
        raise UsageError(f'{type(network).__name__} has no site to put a gate on')
    if hasattr(network, NAME):
        raise UsageError(f'{type(network).__name__} has something called {NAME!r} already')
    modules = dict(network.named_modules())
    if follow_freeze:
        network.train(network.training)  # some freeze their stages only now
    frozen = [site.name for site in sites if follow_freeze and not _learns(modules, site)]
    gates = Gates(sites, gate, follow_freeze, frozen)
    gates.train(network.training)
    add_gates(network, gates)
    return gates


def add_gates(network: nn.Module, gates: Gates) -> None:
    """Make gates those of a network: its child, and hooks on its layers."""
    modules = dict(network.named_modules())
    sites = list(gates.sites.values())
    network.add_module(NAME, gates)
    if any(getattr(m, name, False) is True for m in modules.values() for name in _CHECKPOINTS):
        around = NotReentrant()
        network.register_forward_pre_hook(around.enter)
        network.register_forward_hook(around.leave, always_call=True)
    network.register_forward_pre_hook(gates.keep_modes)
    by_source: dict[tuple[str, int], list[str]] = {}
    for site in sites:
        by_source.setdefault((site.source, site.axis), []).append(site.name)
    for (source, axis), names in by_source.items():
        hook = Decide(gates, names, axis)
        modules[source].register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    ends: dict[str, dict[str, End]] = {}
    for site in sites:
        for end in site.consumers:
            ends.setdefault(end.module, {})[site.name] = end
    noted = {site.name: _first_reader(site) for site in sites}
    for consumer, read in ends.items():
        layer = modules[consumer]
        notes = [name for name in read if noted[name] == consumer]
        layer.register_forward_pre_hook(
            Mask(gates, read, channel_axis(layer), notes), with_kwargs=True
        )
    if hasattr(network, 'init_weights'):
        network.init_weights = InitAfter(network)  # type: ignore[assignment]


def remove_gates(network: nn.Module) -> Gates:
    """Take the gates off a network, which is then what it was before it had any."""
    gates = getattr(network, NAME)
    delattr(network, NAME)
    network.__dict__.pop('init_weights', None)
    for module in network.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, '__self__', hook), _OWN):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_always_called.pop(key, None)
    return gates


_OWN = (Decide, Mask, Gates, NotReentrant)
"""What the hooks are instances of, or methods of one."""


def _learns(modules: Mapping[str, nn.Module], site: Site) -> bool:
    """Whether the layers that make a site's channels do."""
    return any(p.requires_grad for end in site.producers for p in modules[end.module].parameters())


def _first_reader(site: Site) -> str:
    """The first consumer that reads all channels of a site."""
    for end in site.consumers:
        if end.index is None or set(range(site.channels)) <= set(end.index):
            return end.module
    return site.consumers[0].module
