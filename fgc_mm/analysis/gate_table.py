# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a network's gates did over a set of pictures, in memory and on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import numpy as np

from ..errors import UsageError
from ..files import write_files
from ..gates import match_blocks

MACS = ('backbone_executed', 'backbone_dense', 'model_executed', 'model_dense')
SPACES = ('logits', 'mask', 'feature')
_ARRAYS = ('amount', 'objects', 'positions', 'macs')
_HEADER = ('layers', 'classes', 'paths', 'costs', 'info')


@dataclass
class GateTable:
    """Gates, features, classes and MACs of N pictures.

    A picture that the network saw in several windows is here with its last one,
    but with the MACs of all.

    Attributes:
        logits (dict[str, ndarray]): Gate -> N x C.
        mask (dict[str, ndarray]): Gate -> N x C, 0 or 1.
        feature (dict[str, ndarray]): Gate -> N x C, pooled and before gating.
        classes (list[str]): Names of the K classes.
        amount (ndarray): N x K, how much of a class is in a picture: 1 or 0 in
            classification, boxes in detection, share of the pixels in segmentation.
        objects (ndarray): N, annotated objects (in segmentation classes).
        positions (ndarray): N, place of the picture in the dataset.
        paths (list[str]): Its file, '' if it has none.
        macs (ndarray): N x 4, see :data:`MACS`.
        costs (list[dict]): For each counted layer ``layer``, ``kind`` ('gated',
            'plain', 'gate' or 'outside' of the backbone), ``dense`` and
            ``executed`` MACs per picture.
        info (dict): Where it comes from: ``checkpoint``, ``split``, ``task``,
            ``pictures`` (of the whole split), ``coupled`` (gates with FGC), ``blocks`` (of
            each gate).
    """

    logits: dict[str, np.ndarray]
    mask: dict[str, np.ndarray]
    feature: dict[str, np.ndarray]
    classes: list[str]
    amount: np.ndarray
    objects: np.ndarray
    positions: np.ndarray
    paths: list[str]
    macs: np.ndarray
    costs: list[dict[str, Any]]
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> list[str]:
        """Names of the gates, in network order."""
        return list(self.logits)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def present(self) -> np.ndarray:
        """N x K: whether the class is in the picture."""
        return self.amount > 0

    @property
    def main_class(self) -> np.ndarray:
        """N: the class there is most of, -1 without any.

        Classes that are in every picture (a background) say nothing about one
        and are left out, unless there is no other in the picture.
        """
        others = np.where(self.present.all(axis=0), 0, self.amount)
        amount = np.where(others.any(axis=1, keepdims=True), others, self.amount)
        return np.where(amount.any(axis=1), amount.argmax(axis=1), -1)

    def common_classes(self, limit: int = 40) -> list[int]:
        """The classes that most pictures have, in the order of all; what fits into a figure."""
        if len(self.classes) <= limit:
            return list(range(len(self.classes)))
        order = np.argsort(-self.present.sum(axis=0), kind='stable')[:limit]
        return sorted(int(c) for c in order)

    def class_name(self, index: int) -> str:
        """Name of a class; of -1 'none'."""
        return self.classes[index] if index >= 0 else 'none'

    @property
    def categories(self) -> list[str]:
        """N: the name of the main class."""
        return [self.class_name(int(index)) for index in self.main_class]

    def choose(
        self, layers: Union[str, int, Sequence[Union[str, int]]], key: str = 'layers'
    ) -> list[str]:
        """The gates a choice of blocks stands for.

        Args:
            layers (str | int | Sequence): See
                :func:`~fgc_mm.gates.utils.match_blocks`; names of gates as well.
            key (str): What the choice is called, for the error. Defaults to 'layers'.
        """
        block_of = {name: site_name(name).rpartition('.')[0] for name in self.layers}
        block_of |= self.info.get('blocks', {})
        blocks = list(dict.fromkeys(block_of.values()))
        chosen: set[str] = set()
        for item in [layers] if isinstance(layers, (str, int)) else layers:
            own = {
                name
                for name in self.layers
                if item in (name, site_name(name), short_name(name, self.layers))
            }
            found = [] if own else match_blocks(item, blocks, key)
            chosen |= own | {name for name in self.layers if block_of[name] in found}
        return [name for name in self.layers if name in chosen]

    def gates(self, layer: str, space: str = 'logits') -> np.ndarray:
        """One gate's N x C values."""
        return getattr(self, space)[layer]

    def check_finite(self, checkpoint: str) -> None:
        """See that the training did not diverge."""
        for name in self.layers:
            if not (np.isfinite(self.logits[name]).all() and np.isfinite(self.feature[name]).all()):
                raise UsageError(
                    f'{checkpoint}: gate {name} gives NaN or Inf; the training has diverged, take '
                    'an earlier checkpoint'
                )

    def save(self, path: Path) -> None:
        """Write an ``.npz`` file."""
        arrays: dict[str, np.ndarray] = {name: getattr(self, name) for name in _ARRAYS}
        for kind in SPACES:
            for number, values in enumerate(getattr(self, kind).values()):
                arrays[f'{kind}{number}'] = values
        header = {name: getattr(self, name) for name in _HEADER}
        arrays['header'] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        write_files({path: lambda file: np.savez_compressed(file, **arrays)})  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> GateTable:
        """Read what :meth:`save` wrote."""
        with np.load(path) as arrays:
            fields: dict[str, Any] = json.loads(arrays['header'].tobytes())
            layers = list(enumerate(fields.pop('layers')))
            fields |= {name: arrays[name] for name in _ARRAYS}
            for kind in SPACES:
                fields[kind] = {name: arrays[f'{kind}{number}'] for number, name in layers}
        return cls(**fields)


def site_name(layer: str) -> str:
    """Where a gate is: ``backbone.gates.layer4-1-conv1`` -> ``backbone.layer4.1.conv1``."""
    holder, _, own = layer.rpartition('.')
    if holder.rpartition('.')[2] != 'gates':
        return layer
    return f'{holder[: -len("gates")]}{own.replace("-", ".")}'


def short_name(layer: str, layers: Sequence[str]) -> str:
    """A gate's name as figures have it.

    What all names begin with is left out, and the layer's own name where each
    block has one gate: ``backbone.gates.layer4-1-conv1`` -> ``layer4.1``.
    """
    names = [site_name(name) for name in layers]
    name = site_name(layer)
    first, _, rest = name.partition('.')
    alike = all(other.startswith(f'{first}.') for other in names)
    if len({other.rpartition('.')[0] for other in names}) == len(names):
        name, rest = name.rpartition('.')[0], rest.rpartition('.')[0]
    return rest if alike and rest and not first.startswith('layer') else name
