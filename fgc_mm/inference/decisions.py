# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The gates that read one input, as a few products."""

from __future__ import annotations

from typing import Any, Optional, Union

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..gates import BinConcreteGate, Gate, GateRecord
from ..gates.bin_concrete import logit_of
from ..runtime.module_hooks import tell
from ..sites.forward_hooks import as_map
from .frozen_pass import Opened, Side
from .kernels import autocasts


class Decisions:
    """Evaluates the gates of a source with as few operations as possible.

    Each of the two layers of the gates of Feature-Gate Coupling is one product for all of them,
    with norms folded in; other gates are called. Decisions and records are those of the gates up
    to rounding.

    Args:
        gates (dict[str, Gate]): Site -> its gate.
        axis (int): Where the channels of the input are.
        reads (Side, optional): What the input follows: what is closed of it counts as zero.
            Defaults to None.
    """

    def __init__(self, gates: dict[str, Gate], axis: int, reads: Optional[Side] = None) -> None:
        self.gates: dict[str, Any] = gates
        self.axis = axis
        self.reads = reads
        self.bundled = all(map(_is_usual, gates.values()))
        if self.bundled:
            widths = {gate.fc1.out_features for gate in self.gates.values()}
            norms = {type(gate.norm) is nn.LayerNorm for gate in self.gates.values()}
            dtypes = {p.dtype for gate in self.gates.values() for p in gate.parameters()}
            self.bundled = len(dtypes) == 1 and (norms == {False} or len(widths) == len(norms) == 1)
        if self.bundled:
            self._fold()

    @torch.no_grad()
    def _fold(self) -> None:
        gates = list(self.gates.values())
        parts = [_folded(gate) for gate in gates]
        self.first = torch.cat([weight for weight, _ in parts]).t().contiguous()
        self.first_bias = torch.cat([bias for _, bias in parts])
        self.second = torch.block_diag(*(gate.fc2.weight for gate in gates)).t().contiguous()
        self.second_bias = torch.cat([gate.fc2.bias for gate in gates])
        self.norms: tuple = ()
        if type(gates[0].norm) is nn.LayerNorm:
            sides = [_affine(gate.norm, gate.fc1.out_features) for gate in gates]
            weight, bias = (torch.cat(side) for side in zip(*sides, strict=True))
            self.norms = (gates[0].fc1.out_features, weight.to(self.first), bias.to(self.first))
        cuts = [logit_of(gate.threshold) for gate in gates]
        self.cut: Union[float, Tensor] = cuts[0]
        if len(set(cuts)) > 1:
            channels = torch.tensor([gate.channels for gate in gates])
            cut = torch.tensor(cuts).repeat_interleave(channels)
            self.cut = cut.to(self.first)

    def __call__(self, x: Tensor, opened: dict[str, Opened]) -> dict[str, np.ndarray]:
        """Decide, and leave the records.

        Args:
            x (Tensor): The input of the source.
            opened (dict): What was decided about other sites.

        Returns:
            dict[str, np.ndarray]: Site -> B x decisions, truth values of hard gates.
        """
        if not self.bundled:
            return self._one_by_one(x, opened)
        if autocasts() or x.device.type != 'cpu':
            with torch.autocast(x.device.type, enabled=False):
                logits = self._logits(x, opened)
        else:
            logits = self._logits(x, opened)
        decided = (logits > self.cut).cpu().numpy()
        found: dict[str, np.ndarray] = {}
        start = 0
        for site, gate in self.gates.items():
            end = start + gate.channels
            value = decided[:, start:end]
            forced = gate.__dict__['forced']
            if forced is not None:
                value = np.broadcast_to(_array(forced), value.shape)
            gate.__dict__['record'] = LateRecord(logits, start, end, value)
            if gate.fc1._forward_hooks:
                for layer in (gate.fc1, gate.fc2):
                    widths = layer.in_features, layer.out_features
                    tell(layer, *(torch.empty(len(x), width, device='meta') for width in widths))
            found[site] = value
            start = end
        return found

    def _logits(self, x: Tensor, opened: dict[str, Opened]) -> Tensor:
        maps = as_map(x, self.axis)
        positions = maps.size(2) * maps.size(3)
        if maps.dtype == torch.float32 == self.first.dtype and maps.device.type == 'cpu':
            total = self._whole(maps.sum((2, 3)), opened)
            hidden = torch.addmm(self.first_bias, total, self.first, alpha=1 / positions)
        else:
            pooled = self._whole(next(iter(self.gates.values())).pool(maps), opened)
            hidden = torch.addmm(self.first_bias, pooled.to(self.first.dtype), self.first)
        if self.norms:
            width, weight, bias = self.norms
            hidden = F.layer_norm(hidden.view(len(hidden), -1, width), (width,)).flatten(1)
            hidden = torch.addcmul(bias, hidden, weight)
        return torch.addmm(self.second_bias, hidden.relu_(), self.second)

    def _whole(self, pooled: Tensor, opened: dict[str, Opened]) -> Tensor:
        """The pooled input with zeros for what was closed of it."""
        if self.reads is None:
            return pooled
        values = self.reads.factor(opened, everything=True)
        if values is None:
            return pooled
        factor = torch.from_numpy(values).to(pooled)
        index, _ = self.reads.index(opened, pooled.device)
        if index is None or pooled.size(1) == factor.size(1):
            return pooled * factor
        return pooled.new_zeros(factor.shape).index_copy_(1, index, pooled) * factor

    def _one_by_one(self, x: Tensor, opened: dict[str, Opened]) -> dict[str, np.ndarray]:
        found, pooled = {}, {}
        for site, gate in self.gates.items():
            kind = type(gate).pool
            if kind not in pooled:
                pooled[kind] = self._whole(gate.pool(as_map(x, self.axis)), opened)
            value = gate(pooled[kind]).detach().float().cpu().numpy()
            hard = gate.hard and gate.forced is None
            found[site] = value != 0 if hard else value
        return found


class LateRecord(GateRecord):
    """A record whose tensors are made when someone asks for them.

    Args:
        logits (Tensor): Those of all gates of a source side by side.
        start, end (int): The columns of this gate.
        value (np.ndarray): Its decisions.
    """

    def __init__(self, logits: Tensor, start: int, end: int, value: np.ndarray) -> None:
        self._late = logits, start, end, value

    def __getattr__(self, name: str) -> Tensor:
        if name not in ('logits', 'probs', 'mask'):
            raise AttributeError(name)
        logits, start, end, value = self._late
        self.logits = logits[:, start:end]
        self.probs = torch.sigmoid(self.logits)
        self.mask = torch.from_numpy(np.array(value)).to(self.logits)
        return self.__dict__[name]

    def detach(self) -> GateRecord:
        return GateRecord(self.logits, self.probs, self.mask)


def _is_usual(gate: Any) -> bool:
    """Whether the work of a gate can be done here."""
    if type(gate) is not BinConcreteGate or any(
        type(part).forward is not kind.forward or 'forward' in part.__dict__
        for part, kind in ((gate.fc1, nn.Linear), (gate.fc2, nn.Linear))
    ):
        return False
    norm = gate.norm
    folds = isinstance(norm, _BatchNorm) and norm.running_mean is not None
    return folds or type(norm) in (nn.LayerNorm, nn.Identity)


def _folded(gate: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of a gate's first layer with its batch norm."""
    weight, norm = gate.fc1.weight.detach(), gate.norm
    bias = weight.new_zeros(len(weight)) if gate.fc1.bias is None else gate.fc1.bias.detach()
    if not isinstance(norm, _BatchNorm):
        return weight, bias
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    bias = (bias - norm.running_mean) * scale
    bias = bias if norm.bias is None else bias + norm.bias
    return (weight * scale[:, None]).to(weight.dtype), bias.to(weight.dtype)


def _affine(norm: nn.LayerNorm, width: int) -> tuple[Tensor, Tensor]:
    if norm.weight is None:
        return torch.ones(width), torch.zeros(width)
    bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    return norm.weight.detach(), bias.detach()


def _array(forced: Union[float, Tensor]) -> np.ndarray:
    """What a gate is forced to, on the CPU, apart from what was given."""
    if isinstance(forced, Tensor):
        forced = forced.detach().cpu()
        return forced.numpy().copy() if forced.dtype == torch.bool else forced.float().numpy()
    return np.asarray(forced, dtype=np.float32)
