# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Executed and dense MACs of forward passes, image by image."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from ..gates import GateRecord
from .formulas import open_share
from .image_macs import ImageMACs
from .layer_recorder import LayerRecorder


class MACsTracer(LayerRecorder):
    """Counts the MACs of a model while it runs.

    Every call counts as it happens, under the decisions of that moment, and what a head does on
    a region belongs to the picture of that region. See :func:`~fgc_mm.macs.formulas.is_counted`
    for what is not counted.

    Args:
        model (nn.Module): Any model; without gates nothing is saved.
        backbone (str): Name of the part that is the backbone; '' means the
            whole model. Defaults to ''.

    Example:
        >>> tracer = MACsTracer(detector, 'backbone')
        >>> tracer.attach()
        >>> detector(x)
        >>> [image.pruning_ratio for image in tracer.take(len(x))]
        [0.41, 0.37]

    Attributes:
        by_layer (dict): Layer -> its dense and its executed MACs over all images taken so far.
    """

    def __init__(self, model: nn.Module, backbone: str = '') -> None:
        super().__init__(model, backbone)
        self.by_layer: dict[str, tuple[float, float]] = {}

    def take(self, batch_size: int) -> list[ImageMACs]:
        """What was counted since the last time, shared out to the images.

        The MACs of gated layers and of those that work on regions are known image by
        image, all others are the same for every image of a batch.

        Args:
            batch_size (int): Number of images the passes were about.

        Returns:
            list[ImageMACs]: One for each image.
        """
        passes, owners = self._passes()
        masks = _to_cpu(passes)
        executed = torch.zeros(batch_size, 2, dtype=torch.float64)
        dense = torch.zeros_like(executed)
        for call in self.calls:
            in_backbone, is_gate = self.layers[call.layer]
            side = 0 if in_backbone else 1
            share = torch.ones(1, dtype=torch.float64)
            if call.records:
                switch = self.switches[call.layer]
                decided = {name: masks[id(record)] for name, record in call.records.items()}
                groups = getattr(self._modules[call.layer], 'groups', 1)
                share = open_share(switch.ins.mask(decided), switch.outs.mask(decided), groups)
            if call.owners is None:
                part = call.macs / batch_size * torch.ones(batch_size, dtype=torch.float64)
                done = part * (_by_image(share, batch_size).mean(dim=1) if call.records else share)
            else:
                whose = owners[id(call.owners)]
                each = torch.full((call.rows,), call.macs / max(1, call.rows), dtype=torch.float64)
                part, done = (
                    torch.zeros(batch_size, dtype=torch.float64).index_add_(0, whose, values)
                    for values in (each, each * share)
                )
            executed[:, side] += done
            before = self.by_layer.get(call.layer, (0.0, 0.0))
            self.by_layer[call.layer] = before[0] + float(part.sum()), before[1] + float(done.sum())
            if not is_gate:
                dense[:, side] += part
        gates = tuple((name, gate.channels) for name, gate in self.gates.items())
        mine = [[masks[id(r)] for r in passes[name] if id(r) not in owners] for name in self.gates]
        counts, packed = _pack(mine, batch_size)
        regions = _count_open(
            {
                name: [(masks[id(r)], owners[id(r)]) for r in records if id(r) in owners]
                for name, records in passes.items()
            },
            batch_size,
        )
        self.reset()
        return [
            ImageMACs(
                backbone_executed=float(executed[i, 0]),
                backbone_dense=float(dense[i, 0]),
                model_executed=float(executed[i].sum()),
                model_dense=float(dense[i].sum()),
                gates=gates,
                decisions=((counts, packed[i]),) if gates else (),
                regions=regions[i],
            )
            for i in range(batch_size)
        ]

    def _passes(self) -> tuple[dict[str, list[GateRecord]], dict[int, Tensor]]:
        """Gate -> what it decided, each time once; identity of a record about regions, or of the
        pictures they are told of -> these pictures, on the CPU."""
        found: dict[str, dict[int, GateRecord]] = {name: {} for name in self.gates}
        owners: dict[int, Tensor] = {}
        for call in self.calls:
            if call.owners is not None and id(call.owners) not in owners:
                owners[id(call.owners)] = call.owners.detach().long().cpu()
            for name, record in call.records.items():
                found[name].setdefault(id(record), record)
                if call.owners is not None:
                    owners[id(record)] = owners[id(call.owners)]
        return {name: list(records.values()) for name, records in found.items()}, owners

    def _on_layer(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        super()._on_layer(name, module, args, output)
        switch = self.switches.get(name)
        for gate, _ in (*switch.ins.ends, *switch.outs.ends) if switch else ():
            record = self.gates[gate].record
            if record is None:
                raise RuntimeError(
                    f'gate {gate!r} left no record although {name!r} ran; it must decide in '
                    'every pass'
                )
            self.calls[-1].records[gate] = record


def _to_cpu(passes: dict[str, list[GateRecord]]) -> dict[int, Tensor]:
    """All masks in one transfer: identity of the record -> B x channels."""
    records = [record for found in passes.values() for record in found]
    if not records:
        return {}
    flat = torch.cat([record.mask.detach().flatten() != 0 for record in records]).cpu()
    parts = flat.split([record.mask.numel() for record in records])
    return {
        id(record): part.view(record.mask.shape)
        for record, part in zip(records, parts, strict=True)
    }


def _pack(rows: list[list[Tensor]], batch_size: int) -> tuple[tuple[int, ...], list[bytes]]:
    """How often each gate decided, and all decisions of each image as bits."""
    passes, columns = [], []
    for masks in rows:
        views = [_by_image(mask, batch_size) for mask in masks]
        passes.append(sum(view.size(1) for view in views))
        columns += [view.reshape(batch_size, -1) for view in views]
    if not columns:
        return tuple(passes), [b''] * batch_size
    bits = np.packbits(torch.cat(columns, dim=1).numpy(), axis=1)
    return tuple(passes), [row.tobytes() for row in bits]


def _count_open(
    decided: dict[str, list[tuple[Tensor, Tensor]]], batch_size: int
) -> list[dict[str, tuple[int, np.ndarray]]]:
    """For each image: gate -> how many regions it decided about, and in how many of them each of
    its channels is open."""
    found: list[dict[str, tuple[int, np.ndarray]]] = [{} for _ in range(batch_size)]
    for name, parts in decided.items():
        if not parts:
            continue
        masks = torch.cat([mask for mask, _ in parts]).long()
        owners = torch.cat([owner for _, owner in parts])
        counts = torch.bincount(owners, minlength=batch_size)
        opened = torch.zeros(batch_size, masks.size(1), dtype=torch.long)
        opened.index_add_(0, owners, masks)
        for i in range(batch_size):
            found[i][name] = int(counts[i]), opened[i].int().numpy()
    return found


def count_macs(
    model: nn.Module, *inputs: Any, backbone: str = '', **kwargs: Any
) -> list[ImageMACs]:
    """MACs of one forward pass.

    Args:
        model (nn.Module): The model, in the mode it is to be counted in.
        inputs: Its inputs; the first is the batch of images.
        backbone (str): Name of the part that is the backbone. Defaults to '',
            the whole model.
        kwargs: Further arguments of the model.

    Returns:
        list[ImageMACs]: One for each image.
    """
    tracer = MACsTracer(model, backbone)
    tracer.attach()
    try:
        with torch.no_grad():
            model(*inputs, **kwargs)
    finally:
        tracer.detach()
    return tracer.take(len(inputs[0]))


def _by_image(values: Tensor, batch_size: int) -> Tensor:
    """Rows of several views, image by image: B x views x ... ."""
    if values.size(0) % batch_size:
        raise RuntimeError(
            f'a gate decided for {values.size(0)} images in a pass over {batch_size}; only whole '
            'multiples, and regions that a RoI extractor cut out, can be attributed to images'
        )
    return values.reshape(batch_size, -1, *values.shape[1:])
