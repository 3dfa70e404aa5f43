# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The gates of a block as a few products."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Optional, Union

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..gates import BinConcreteGate, Gate, GateRecord
from ..gates.base import pool_mean
from ..gates.bin_concrete import logit_of
from ..nets import GatedBlock
from ..runtime.module_hooks import is_watched, tell
from .forwards import autocasts, is_foldable, is_unpatched
from .stamp import Source, Stamp, checks

_METHODS = ('forward', 'decide', 'decision', 'pool')
"""Of a gate, whose work is done here."""
_FEW = 1 << 17
"""Values that NumPy sums up, in one thread, sooner than PyTorch gets started."""


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
    def fits(gates: dict[str, Gate], block: Optional[GatedBlock] = None) -> bool:
        """Whether these gates can be bundled, and the block just calls them."""
        if block is not None:
            usual = type(block).decide is GatedBlock.decide and 'decide' not in block.__dict__
            if not usual:
                return False
        if len({gate.in_channels for gate in gates.values()}) != 1:
            return False
        for gate in gates.values():
            if type(gate) is not BinConcreteGate or not gate.__dict__.keys().isdisjoint(_METHODS):
                return False
            if not (_is_plain(gate.fc1) and _is_plain(gate.fc2)):
                return False
            norm = gate.norm
            plain = type(norm) in (nn.LayerNorm, nn.Identity) and is_unpatched(norm)
            if not (plain or is_foldable(norm)):
                return False
        return True

    def reset(self) -> None:
        """Forget what was prepared."""
        self._lock = threading.Lock()
        self._prepared: Optional[tuple[Stamp, tuple[Tensor, ...]]] = None
        self._known: Optional[tuple] = None

    def watched(self, block: Optional[GatedBlock] = None) -> bool:
        """Whether the modules of the gates must be called: someone waits for it, or
        they are no longer what was prepared."""
        if not self.fits(self.gates, block):
            return True
        for gate in self.gates.values():
            for module in (gate, gate.fc1, gate.norm, gate.fc2):
                if is_watched(module):
                    return True
        return False

    def decide(self, x: Tensor) -> dict[str, np.ndarray]:
        """Evaluate the gates on the block input and leave their records.

        Between two large convolutions nothing is in the caches: what costs is the
        number of different operations, so as much as possible is left for
        when someone reads a record.

        Args:
            x (Tensor): The block input.

        Returns:
            dict[str, np.ndarray]: Name of the gate -> B x C, what its feature is
            multiplied with.
        """
        prepared = self._weights()
        if not prepared:
            return self._one_by_one(x)
        usual = x.dtype == torch.float32 and x.device.type == 'cpu' and not x.requires_grad
        usual = usual and prepared[0].dtype == torch.float32
        if usual and not self.layer_norms and (checks.done or not autocasts()):
            logits, decided = self._quickly(x, prepared)
        else:
            with torch.autocast(x.device.type, enabled=False):
                known = self._logits(x, prepared)
            logits, decided = partial(_same, known), _opened(known, self._cut())
        values: dict[str, np.ndarray] = {}
        start = 0
        for name, gate in self.gates.items():
            own = gate.__dict__  # where modules would look for much else first
            end = start + own['channels']
            value = decided[:, start:end]
            if own['forced'] is not None:
                forced = _array(own['forced'])
                same = forced.shape == value.shape
                value = forced if same else np.broadcast_to(forced, value.shape)
            if own['_modules']['fc1']._forward_hooks:
                self._tell(gate, x.size(0))
            own['record'] = LateRecord(logits, start, end, value)
            values[name] = value
            start = end
        return values

    def _one_by_one(self, x: Tensor) -> dict[str, np.ndarray]:
        """What the gates themselves decide."""
        pooled = pool_mean(x)
        values = {name: gate(pooled) for name, gate in self.gates.items()}
        return {name: value.float().cpu().numpy() for name, value in values.items()}

    def _tell(self, gate: Any, batch: int) -> None:
        """Let those who count see the layers of a gate, which are not called."""
        for layer in (gate.fc1, gate.fc2):
            sides = (torch.empty(batch, width, device='meta') for width in layer.weight.shape[::-1])
            tell(layer, *sides)

    def _quickly(
        self, x: Tensor, prepared: tuple[Tensor, ...]
    ) -> tuple[Callable[[], Tensor], np.ndarray]:
        """Logits, when they are asked for, and decisions on a CPU.

        The mean is a sum whose factor goes into biases and threshold.
        """
        positions = x.size(2) * x.size(3)
        first, bias, second, limit = self._at(prepared, positions)
        if x.numel() <= _FEW:
            total = torch.from_numpy(np.add.reduce(x.numpy(), axis=(2, 3)))
        else:
            total = x.sum((2, 3))
        hidden = torch.addmm(bias, total, first).relu_()
        product = hidden.mm(second)
        return partial(_scaled, product, positions, prepared[3]), product.numpy() > limit

    def _at(
        self, prepared: tuple[Tensor, ...], positions: int
    ) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
        """Weights, bias and limit for sums over so many positions."""
        thresholds = [gate.threshold for gate in self.gates.values()]
        known = self._known
        if known is None or known[0] is not prepared or known[1:3] != (positions, thresholds):
            first, bias, second, second_bias = prepared
            cut = np.float32(self._cut()).astype(np.float64)  # the gates compare in float32
            limit = (positions * (cut - second_bias.numpy())).astype(np.float32)
            scaled = first, positions * bias, second, limit
            known = self._known = (prepared, positions, thresholds, scaled)
        return known[3]

    def _logits(self, x: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
        first, first_bias, second, second_bias = prepared
        hidden = torch.addmm(first_bias, pool_mean(x).to(first.dtype), first)
        if self.layer_norms:
            gates = self.gates.values()
            parts = hidden.split([gate.fc1.out_features for gate in gates], dim=1)
            parts = [
                gate.norm(part) if type(gate.norm) is nn.LayerNorm else part
                for gate, part in zip(gates, parts, strict=True)
            ]
            hidden = torch.cat(parts, dim=1)
        return torch.addmm(second_bias, hidden.relu_(), second)

    def _cut(self) -> Union[float, np.ndarray]:
        """The logit above which a channel is open; one for each if gates differ."""
        thresholds = [gate.threshold for gate in self.gates.values()]
        if len(set(thresholds)) == 1:
            return logit_of(thresholds[0])
        widths = [gate.channels for gate in self.gates.values()]
        return np.repeat([logit_of(threshold) for threshold in thresholds], widths)

    def refresh(self) -> None:
        """Prepare the weights, anew if the parameters have changed."""
        prepared = self._prepared
        if prepared is None or not prepared[0].holds():
            with self._lock:
                self._prepared = (Stamp(self.sources()), self._fold())

    def _weights(self) -> tuple[Tensor, ...]:
        """First layers side by side, in_channels x hidden, their bias, second
        layers down a diagonal, hidden x channels, and their bias; none of them if
        they are of different types."""
        if self._prepared is None or not checks.done:
            self.refresh()
        prepared = self._prepared
        assert prepared is not None
        return prepared[1]

    def sources(self) -> list[Source]:
        """What the prepared weights are made of."""
        sources: list[Source] = []
        for gate in self.gates.values():
            sources += [(gate.__dict__, key) for key in _METHODS]
            for layer in (gate.fc1, gate.fc2):
                sources += [(layer._parameters, key) for key in ('weight', 'bias')]
                sources.append((layer.__dict__, 'forward'))
            sources += [(gate.norm.__dict__, key) for key in ('eps', 'forward')]
            if isinstance(gate.norm, _BatchNorm):
                sources += [(gate.norm._parameters, key) for key in ('weight', 'bias')]
                sources += [(gate.norm._buffers, key) for key in ('running_mean', 'running_var')]
        return sources

    @torch.no_grad()
    def _fold(self) -> tuple[Tensor, ...]:
        weights, biases = [], []
        found = [owner.get(key) for owner, key in self.sources()]
        if len({each.dtype for each in found if isinstance(each, Tensor)}) > 1:
            return ()
        for gate in self.gates.values():
            weight = gate.fc1.weight.detach().clone()
            bias = _bias(gate.fc1)
            norm: Any = gate.norm
            if isinstance(gate.norm, _BatchNorm):
                scale = torch.rsqrt(norm.running_var + norm.eps)
                scale = scale if norm.weight is None else scale * norm.weight
                bias = (bias - norm.running_mean) * scale
                bias = bias if norm.bias is None else bias + norm.bias
                weight = weight * scale[:, None]
            weights.append(weight)
            biases.append(bias.to(weight.dtype))
        second = torch.block_diag(*(gate.fc2.weight.detach() for gate in self.gates.values()))
        second_bias = torch.cat([_bias(gate.fc2) for gate in self.gates.values()])
        return (
            torch.cat(weights).t().contiguous(),
            torch.cat(biases),
            second.t().contiguous(),
            second_bias,
        )

    def __getstate__(self) -> dict:
        # Locks cannot be copied, and weights are prepared again in a moment.
        return {'gates': self.gates, 'layer_norms': self.layer_norms}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.reset()


class LateRecord(GateRecord):
    """A record whose tensors are made when someone asks for them.

    Args:
        logits (Callable): Gives those of all gates of a block side by side.
        start, end (int): The columns of this gate.
        value (np.ndarray): Its decisions.
    """

    def __init__(
        self, logits: Callable[[], Tensor], start: int, end: int, value: np.ndarray
    ) -> None:
        self._late = logits, start, end, value

    def __getattr__(self, name: str) -> Tensor:
        if name not in ('logits', 'probs', 'mask'):
            raise AttributeError(name)
        logits, start, end, value = self._late
        self.logits = logits()[:, start:end]
        self.probs = torch.sigmoid(self.logits)
        self.mask = torch.from_numpy(np.array(value)).to(self.logits)
        return self.__dict__[name]

    def detach(self) -> GateRecord:
        return GateRecord(self.logits, self.probs, self.mask, self.feature)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is nothing but ``F.linear`` of its weight."""
    kind = type(layer) is nn.Linear and layer._parameters.get('weight') is not None
    return kind and is_unpatched(layer)


def _bias(layer: nn.Linear) -> Tensor:
    if layer.bias is None:
        return layer.weight.new_zeros(layer.out_features)
    return layer.bias.detach()


def _same(logits: Tensor) -> Tensor:
    return logits


def _scaled(product: Tensor, positions: int, bias: Tensor) -> Tensor:
    """Logits from the product of sums."""
    return product / positions + bias


def _opened(logits: Tensor, cut: Union[float, np.ndarray]) -> np.ndarray:
    """Which channels are open, on the CPU, in one transfer."""
    limit = cut if isinstance(cut, float) else torch.from_numpy(cut).to(logits)
    return (logits > limit).cpu().numpy()


def _array(forced: Union[float, Tensor]) -> np.ndarray:
    """What a gate is forced to, on the CPU."""
    if isinstance(forced, Tensor):
        plain = forced.device.type == 'cpu' and forced.dtype in (torch.float32, torch.bool)
        if plain and not forced.requires_grad:
            return forced.numpy().copy()  # the record must not change with it
        return forced.detach().float().cpu().numpy()
    return np.asarray(forced, dtype=np.float32)
