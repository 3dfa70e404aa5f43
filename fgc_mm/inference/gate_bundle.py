# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The gates of a block as a few products."""

from __future__ import annotations

import threading
from typing import Any, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..gates import BinConcreteGate, Gate, GateRecord
from ..gates.base import pool_mean
from .stamp import Source, Stamp


class GateBundle:
    """Evaluates the gates of a block with as few operations as possible.

    A gate is a tiny network: its cost is that of starting its operations, which
    on small pictures is felt. Here the first layers of all gates are one product
    with their batch norm folded in. Decisions and records are those of the gates
    up to rounding.

    Args:
        gates (dict[str, Gate]): Gates that :meth:`fits`.
    """

    def __init__(self, gates: dict[str, Gate]) -> None:
        self.gates: dict[str, Any] = dict(gates)
        self.reset()

    @staticmethod
    def fits(gates: dict[str, Gate]) -> bool:
        """Whether these gates can be bundled."""
        if len({gate.in_channels for gate in gates.values()}) != 1:
            return False
        for gate in gates.values():
            if type(gate) is not BinConcreteGate or type(gate.fc1) is not nn.Linear:
                return False
            norm = gate.norm
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
                continue
            if type(norm) not in (nn.LayerNorm, nn.Identity):
                return False
        return True

    def reset(self) -> None:
        """Forget what was prepared."""
        self._lock = threading.Lock()
        self._prepared: Optional[tuple[Stamp, Tensor, Tensor]] = None

    def watched(self) -> bool:
        """Whether someone waits for the modules of the gates to be called."""
        for gate in self.gates.values():
            for module in (gate, gate.fc1, gate.norm, gate.fc2):
                if module._forward_hooks or module._forward_pre_hooks:
                    return True
        return False

    def decide(self, x: Tensor) -> dict[str, Tensor]:
        """Evaluate the gates on the block input, as ``GatedBlock.decide`` does.

        Args:
            x (Tensor): The block input.

        Returns:
            dict[str, Tensor]: Name of the gate -> B x C, what its feature is
            multiplied with.
        """
        weight, bias = self._weights()
        hidden = torch.addmm(bias, pool_mean(x).to(weight.dtype), weight)
        multipliers = {}
        start = 0
        for name, gate in self.gates.items():
            own = hidden[:, start : start + gate.fc1.out_features]
            start += gate.fc1.out_features
            if type(gate.norm) is nn.LayerNorm:
                own = gate.norm(own)
            logits = F.linear(torch.relu(own), gate.fc2.weight, gate.fc2.bias)
            probs = torch.sigmoid(logits)
            multiplier = torch.gt(probs, gate.threshold, out=torch.empty_like(probs))
            record = GateRecord(logits, probs, multiplier)
            multipliers[name] = gate.settle(multiplier, record)
        return multipliers

    def _weights(self) -> tuple[Tensor, Tensor]:
        """First layers side by side, in_channels x hidden, and their bias."""
        prepared = self._prepared
        if prepared is None or not prepared[0].holds():
            with self._lock:
                prepared = self._prepared = (Stamp(self._sources()), *self._fold())
        return prepared[1], prepared[2]

    def _sources(self) -> list[Source]:
        sources: list[Source] = []
        for gate in self.gates.values():
            sources.append((gate.fc1._parameters, 'weight'))
            if isinstance(gate.norm, _BatchNorm):
                sources += [(gate.norm._parameters, key) for key in ('weight', 'bias')]
                sources += [(gate.norm._buffers, key) for key in ('running_mean', 'running_var')]
        return sources

    @torch.no_grad()
    def _fold(self) -> tuple[Tensor, Tensor]:
        weights, biases = [], []
        for gate in self.gates.values():
            weight = gate.fc1.weight.detach().clone()
            bias = weight.new_zeros(weight.size(0))
            norm = gate.norm
            if isinstance(norm, _BatchNorm):
                scale = torch.rsqrt(norm.running_var + norm.eps)
                scale = scale if norm.weight is None else scale * norm.weight
                bias = -norm.running_mean * scale
                bias = bias if norm.bias is None else bias + norm.bias
                weight = weight * scale[:, None]
            weights.append(weight)
            biases.append(bias.to(weight.dtype))
        return torch.cat(weights).t().contiguous(), torch.cat(biases)

    def __getstate__(self) -> dict:
        # Locks cannot be copied, and weights are prepared again in a moment.
        return {'gates': self.gates}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.reset()
