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
from .frozen_layer import fold
from .frozen_pass import Opened, Side
from .kernels import autocasts


class Decisions:
    """Evaluates the gates of a source with as few operations as possible.

    Each of the two layers of the gates of Feature-Gate Coupling is one product for all of them,
    with norms folded in; other gates are called. Decisions and records are those of the gates up
    to rounding. What is closed of the input (what it ``reads``) counts as zero.
    """

    def __init__(self, gates: dict[str, Gate], axis: int, reads: Optional[Side]) -> None:
        self.gates: dict[str, Any] = gates
        self.axis = axis
        self.reads = reads
        kinds = {_kind(gate) for gate in gates.values()}
        self.bundled = len(kinds) == 1 and kinds != {None}
        if self.bundled:
            self._bundle(list(self.gates.values()))

    @torch.no_grad()
    def _bundle(self, gates: list[Any]) -> None:
        norms = [gate.norm for gate in gates]
        self.width = gates[0].fc1.out_features if type(norms[0]) is nn.LayerNorm else 0
        folded = [isinstance(norm, _BatchNorm) for norm in norms]
        layers = [
            fold(g.fc1, n if is_folded else None)
            for g, n, is_folded in zip(gates, norms, folded, strict=True)
        ]
        self.first = torch.cat([weight for weight, _ in layers]).t().contiguous()
        biases = [w.new_zeros(len(w)) if b is None else b for w, b in layers]
        self.first_bias = torch.cat(biases)
        self.second = torch.block_diag(*(gate.fc2.weight for gate in gates)).t().contiguous()
        self.second_bias = torch.cat([gate.fc2.bias for gate in gates])
        if self.width:
            ones = torch.ones_like(self.first_bias[: self.width])
            scales = [ones if norm.weight is None else norm.weight for norm in norms]
            shifts = [0 * ones if norm.bias is None else norm.bias for norm in norms]
            self.norm = torch.cat(scales), torch.cat(shifts)
        cuts = torch.tensor([logit_of(gate.threshold) for gate in gates])
        counts = torch.tensor([gate.channels for gate in gates])
        self.cut = cuts.repeat_interleave(counts).to(self.first)

    def __call__(self, x: Tensor, opened: dict[str, Opened]) -> dict[str, np.ndarray]:
        """Site -> B x decisions (truth values of hard gates); leaves the records."""
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
            record = LateRecord(logits[:, start:end], value)
            if gate.calls > 1:
                gate.settle(None, record)
            else:
                gate.__dict__['record'] = record
            if gate.fc1._forward_hooks:
                for layer in (gate.fc1, gate.fc2):
                    widths = layer.in_features, layer.out_features
                    tell(layer, *(torch.empty(len(x), width, device='meta') for width in widths))
            found[site] = value
            start = end
        return found

    def _logits(self, x: Tensor, opened: dict[str, Opened]) -> Tensor:
        pooled = self._pooled(next(iter(self.gates.values())), x, opened).to(self.first.dtype)
        hidden = torch.addmm(self.first_bias, pooled, self.first)
        if self.width:
            hidden = F.layer_norm(hidden.view(len(hidden), -1, self.width), (self.width,))
            hidden = torch.addcmul(self.norm[1], hidden.flatten(1), self.norm[0])
        return torch.addmm(self.second_bias, hidden.relu_(), self.second)

    def _pooled(self, gate: Any, x: Tensor, opened: dict[str, Opened]) -> Tensor:
        """The pooled input with zeros for what was closed of it."""
        pooled = gate.pool(as_map(x, self.axis))
        values = self.reads.factor(opened, everything=True) if self.reads else None
        if self.reads is None or values is None:
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
                pooled[kind] = self._pooled(gate, x, opened)
            value = gate(pooled[kind]).detach().float().cpu().numpy()
            hard = gate.hard and gate.forced is None
            found[site] = value != 0 if hard else value
        return found


class LateRecord(GateRecord):
    """A record whose probabilities and mask are made when someone asks for them."""

    def __init__(self, logits: Tensor, value: np.ndarray) -> None:
        self.logits = logits
        self._value = value

    def __getattr__(self, name: str) -> Tensor:
        if name == 'probs':
            self.probs = torch.sigmoid(self.logits)
        elif name == 'mask':
            self.mask = torch.from_numpy(np.array(self._value)).to(self.logits)
        else:
            raise AttributeError(name)
        return self.__dict__[name]

    def detach(self) -> GateRecord:
        return GateRecord(self.logits, self.probs, self.mask)


def _kind(gate: Any) -> Optional[tuple]:
    """What gates must have in common for one product; None if a gate must be called."""
    if type(gate) is not BinConcreteGate or any(
        type(part).forward is not nn.Linear.forward or 'forward' in part.__dict__
        for part in (gate.fc1, gate.fc2)
    ):
        return None
    norm, dtype = gate.norm, gate.fc1.weight.dtype
    if type(norm) is nn.LayerNorm:
        return dtype, gate.fc1.out_features
    folds = isinstance(norm, _BatchNorm) and norm.running_mean is not None
    return (dtype, 0) if folds or type(norm) is nn.Identity else None


def _array(forced: Union[float, Tensor]) -> np.ndarray:
    """What a gate is forced to, on the CPU, apart from what was given."""
    if isinstance(forced, Tensor):
        forced = forced.detach().cpu()
        return forced.numpy().copy() if forced.dtype == torch.bool else forced.float().numpy()
    return np.asarray(forced, dtype=np.float32)
