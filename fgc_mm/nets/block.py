# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What all gated blocks have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, Protocol, Union

import torch
import torch.nn as nn
import torch.utils.checkpoint as cp
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor

from ..errors import UsageError
from ..gates import Gate, GateSite

Activation = Callable[[Tensor], Tensor]
InitCfg = Union[dict, Sequence[dict], None]


class RunLayer(Protocol):
    """Runs one convolution of a block and what belongs to it."""

    def __call__(
        self,
        x: Tensor,
        conv: str,
        norm: Optional[str] = None,
        act: Optional[Activation] = None,
        gate: Optional[str] = None,
        plus: Optional[Tensor] = None,
    ) -> Tensor:
        """Convolve, normalize, add, activate, mask.

        Args:
            x (Tensor): Input of the convolution.
            conv (str): Name of the convolution in the block.
            norm (str, optional): Name of the norm. Defaults to None.
            act (Callable, optional): The activation. Defaults to None.
            gate (str, optional): Name of the gate whose mask is applied after
                the activation; one that was not built masks nothing.
                Defaults to None.
            plus (Tensor, optional): Added after the norm: the shortcut, which
                is the block input or was computed from it for this alone.
                Defaults to None.
        """


Body = Callable[[Tensor, RunLayer], Tensor]


class PlainLayer(NamedTuple):
    """Names of an ungated convolution and what comes directly after it.

    Attributes:
        conv (str): The convolution.
        norm (str): The norm after it.
        act (str, optional): An activation that is used after that norm and
            nowhere else. Defaults to None.
    """

    conv: str
    norm: str
    act: Optional[str] = None


class BlockRunner(Protocol):
    """Another way to run a block; see :mod:`fgc_mm.inference`."""

    def applies(self, x: Tensor) -> bool:
        """Whether it can run the block on this input now."""

    def run(self, body: Body, x: Tensor) -> Tensor:
        """What :meth:`GatedBlock.run_gated` returns."""


class GatedBlock(BaseModule):
    """A block whose convolutions can be gated.

    A subclass calls :meth:`add_gate` once for every convolution that may be
    gated, writes its computation as ``body(x, layer)`` and runs it by
    ``self.run_gated(self.body, x)``. Inside, every convolution a gate switches
    is run by ``layer(x, conv, norm, act, gate, plus)``, see :class:`RunLayer`, so
    that closed channels can be masked in training and left out in evaluation.
    Because gates are evaluated before ``body``, it can be checkpointed.

    Args:
        with_cp (bool): Recompute ``body`` in the backward pass to save memory.
            Defaults to False.
        init_cfg (dict, optional): Initialization config. Defaults to None.
    """

    def __init__(self, with_cp: bool = False, init_cfg: InitCfg = None) -> None:
        super().__init__(init_cfg=init_cfg)
        self.with_cp = with_cp
        self._sites: list[GateSite] = []
        # Takes the place of masked execution where it applies.
        self.runner: Optional[BlockRunner] = None

    def add_gate(
        self,
        name: str,
        cfg: Optional[dict],
        in_channels: int,
        channels: int,
        produces: Sequence[str],
        consumes: Sequence[str],
        norms: Sequence[str],
    ) -> None:
        """Build a gate and remember its place.

        Args:
            name (str): Name of the gate, ``'gate1'`` for ``conv1`` and so on.
            cfg (dict, optional): Config of the gate without its widths; None
                leaves the convolution ungated.
            in_channels (int): Channels of the block input.
            channels (int): Channels of the gated feature.
            produces (Sequence[str]): Convolutions whose output it switches.
            consumes (Sequence[str]): Convolutions whose input it switches.
            norms (Sequence[str]): The normalizations of those outputs, in the
                order of ``produces``.
        """
        if cfg is None:
            return
        self.add_module(name, build_gate(cfg, in_channels, channels))
        self._sites.append(
            GateSite(name, tuple(produces), tuple(consumes), norms[-1], tuple(norms))
        )

    def gate_sites(self) -> list[GateSite]:
        """Where the gates of this block sit, in the order they are applied."""
        return list(self._sites)

    def gates(self) -> dict[str, Gate]:
        """The gates of this block by name."""
        return {site.gate: getattr(self, site.gate) for site in self._sites}

    def plain_layers(self) -> list[PlainLayer]:
        """The layers that ``body`` does not run by ``layer``: those of a shortcut."""
        return []

    def decide(self, x: Tensor) -> dict[str, Tensor]:
        """Evaluate the gates on the block input.

        Returns:
            dict[str, Tensor]: Name of the gate -> B x C, what its feature is
            multiplied with.
        """
        gates = self.gates()
        if not gates:
            return {}
        pooled = next(iter(gates.values())).pool(x)
        return {name: gate(pooled) for name, gate in gates.items()}

    def run_gated(self, body: Body, x: Tensor) -> Tensor:
        """Evaluate the gates on ``x``, then run ``body`` under their masks.

        Args:
            body (Callable): ``body(x, layer) -> out``.
            x (Tensor): The block input, which all gates of the block read.

        Returns:
            Tensor: What ``body`` returns.
        """
        if self.runner is not None and self.runner.applies(x):
            return self.runner.run(body, x)
        gates = self.gates()
        multipliers = list(self.decide(x).values())

        def inner(x: Tensor, *multipliers: Tensor) -> tuple[Tensor, ...]:
            values = dict(zip(gates, multipliers, strict=True))
            features: dict[str, Tensor] = {}

            def layer(
                x: Tensor,
                conv: str,
                norm: Optional[str] = None,
                act: Optional[Activation] = None,
                gate: Optional[str] = None,
                plus: Optional[Tensor] = None,
            ) -> Tensor:
                out = self.get_submodule(conv)(x)
                if norm is not None:
                    out = self.get_submodule(norm)(out)
                if plus is not None:
                    out += plus
                if gate in values:
                    act = nn.Identity() if act is None else act
                    out, features[gate] = gates[gate].activate(out, values[gate], act)
                    return out
                return out if act is None else act(out)

            out = body(x, layer)
            return (out, *(features[name] for name in values))

        differentiable = any(t.requires_grad for t in (x, *multipliers))
        if self.with_cp and differentiable and torch.is_grad_enabled():
            out, *features = cp.checkpoint(inner, x, *multipliers, use_reentrant=False)
        else:
            out, *features = inner(x, *multipliers)
        for gate, feature in zip(gates.values(), features, strict=True):
            gate.note_feature(feature)
        return out


def build_gate(cfg: dict, in_channels: int, channels: int) -> Gate:
    """Build a gate of the given widths from its config.

    Args:
        cfg (dict): Config of the gate, such as ``dict(type='BinConcreteGate')``.
        in_channels (int): Channels of the block input.
        channels (int): Channels of the gated feature.

    Returns:
        Gate: The gate.
    """
    widths = dict(in_channels=in_channels, channels=channels)
    for key, width in widths.items():
        if cfg.get(key, width) != width:
            raise UsageError(
                f'gate: {key}={cfg[key]} does not match the convolution, which needs {width}; '
                'leave it out, the backbone fills it in'
            )
    with MODELS.switch_scope_and_registry(cfg.get('_scope_')) as registry:
        kind = registry.get(cfg['type']) if isinstance(cfg['type'], str) else cfg['type']
    if not _is_gate(kind):
        known = [name for name, cls in MODELS.module_dict.items() if _is_gate(cls)]
        problem = 'is not registered' if kind is None else 'is no gate'
        raise UsageError(f'gate: type={cfg["type"]!r} {problem}; choose from {", ".join(known)}')
    return MODELS.build({**cfg, **widths})


def _is_gate(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Gate)
