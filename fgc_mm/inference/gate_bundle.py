# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The gates of a block as a few products."""

from __future__ import annotations

import threading
from typing import Any, Optional, Union

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..gates import BinConcreteGate, Gate, GateRecord
from ..gates.base import pool_mean
from .stamp import Source, Stamp


class GateBundle:
    """Evaluates the gates of a block with as few operations as possible.

    A gate is a tiny network: its cost is that of starting its operations, which
    on small pictures is felt. Here each of the two layers is one product for all
    gates, with their batch norm folded in. Decisions and records are those of the gates
    up to rounding.

    Args:
        gates (dict[str, Gate]): Gates that :meth:`fits`.
    """

    def __init__(self, gates: dict[str, Gate]) -> None:
        self.gates: dict[str, Any] = dict(gates)
        self.layer_norms = any(type(gate.norm) is nn.LayerNorm for gate in self.gates.values())
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
        self._prepared: Optional[tuple[Stamp, tuple[Tensor, ...]]] = None

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
        with torch.autocast(x.device.type, enabled=False):
            return self._decide(pool_mean(x))

    def _decide(self, pooled: Tensor) -> dict[str, Tensor]:
        first, first_bias, second, second_bias = self._weights()
        gates = self.gates.values()
        hidden = torch.addmm(first_bias, pooled.to(first.dtype), first)
        if self.layer_norms:
            parts = hidden.split([gate.fc1.out_features for gate in gates], dim=1)
            parts = [
                gate.norm(part) if type(gate.norm) is nn.LayerNorm else part
                for gate, part in zip(gates, parts, strict=True)
            ]
            hidden = torch.cat(parts, dim=1)
        logits = torch.addmm(second_bias, hidden.relu_(), second)
        probs = torch.sigmoid(logits)
        masks = torch.gt(probs, self._threshold(probs), out=torch.empty_like(probs))
        widths = [gate.channels for gate in gates]
        pieces = zip(*(each.split(widths, dim=1) for each in (logits, probs, masks)), strict=True)
        multipliers = {}
        for (name, gate), piece in zip(self.gates.items(), pieces, strict=True):
            decided = gate.impose(piece[2], GateRecord(*piece))
            multipliers[name] = gate.settle(*decided)
        return multipliers

    def _threshold(self, like: Tensor) -> Union[float, Tensor]:
        """One number, or one for each channel if the gates' own differ."""
        thresholds = [gate.threshold for gate in self.gates.values()]
        if len(set(thresholds)) == 1:
            return thresholds[0]
        widths = [gate.channels for gate in self.gates.values()]
        return like.new_tensor(np.repeat(thresholds, widths))

    def _weights(self) -> tuple[Tensor, ...]:
        """First layers side by side, in_channels x hidden, their bias, second
        layers down a diagonal, hidden x channels, and their bias."""
        prepared = self._prepared
        if prepared is None or not prepared[0].holds():
            with self._lock:
                prepared = self._prepared = (Stamp(self._sources()), self._fold())
        return prepared[1]

    def _sources(self) -> list[Source]:
        sources: list[Source] = []
        for gate in self.gates.values():
            sources.append((gate.fc1._parameters, 'weight'))
            sources += [(gate.fc2._parameters, key) for key in ('weight', 'bias')]
            if isinstance(gate.norm, _BatchNorm):
                sources += [(gate.norm._parameters, key) for key in ('weight', 'bias')]
                sources += [(gate.norm._buffers, key) for key in ('running_mean', 'running_var')]
        return sources

    @torch.no_grad()
    def _fold(self) -> tuple[Tensor, ...]:
        weights, biases = [], []
        for gate in self.gates.values():
            weight = gate.fc1.weight.detach().clone()
            bias = weight.new_zeros(weight.size(0))
            norm: Any = gate.norm
            if isinstance(gate.norm, _BatchNorm):
                scale = torch.rsqrt(norm.running_var + norm.eps)
                scale = scale if norm.weight is None else scale * norm.weight
                bias = -norm.running_mean * scale
                bias = bias if norm.bias is None else bias + norm.bias
                weight = weight * scale[:, None]
            weights.append(weight)
            biases.append(bias.to(weight.dtype))
        second = torch.block_diag(*(gate.fc2.weight.detach() for gate in self.gates.values()))
        second_bias = torch.cat([gate.fc2.bias.detach() for gate in self.gates.values()])
        return torch.cat(weights).t().contiguous(), torch.cat(biases), second.t(), second_bias

    def __getstate__(self) -> dict:
        # Locks cannot be copied, and weights are prepared again in a moment.
        return {'gates': self.gates, 'layer_norms': self.layer_norms}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.reset()
