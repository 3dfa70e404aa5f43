# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Executed and dense MACs of forward passes, image by image."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from ..gates import find_gates
from ..runtime import Attachments
from .formulas import open_share
from .gated_convs import GatedConv, block_sites, full_name, gated_convs
from .image_macs import ImageMACs
from .layers import call_macs, is_counted


@dataclass
class _Layer:
    """How the calls of one layer are counted."""

    in_backbone: bool
    is_gate: bool
    groups: int
    gated: Optional[GatedConv] = None


@dataclass
class _GatedCall:
    """One call of a gated convolution, under the masks of its pass."""

    macs: int
    layer: _Layer
    in_mask: Optional[int]
    out_mask: Optional[int]


class MACsTracer:
    """Counts the MACs of a model while it runs.

    The output size of each layer is read off its calls, so any image size,
    windows of an image and repeated layers are counted as they happen. A gated
    block is settled at the end of its forward, when the records of its gates
    are those of this pass. See :func:`~fgc_mm.macs.layers.is_counted` for
    what is not counted.

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
    """

    def __init__(self, model: nn.Module, backbone: str = '') -> None:
        self._modules = dict(model.named_modules())
        if backbone not in self._modules:
            parts = ', '.join(repr(name) for name, _ in model.named_children())
            raise UsageError(
                f'backbone={backbone!r} is no part of {type(model).__name__}; name one of its '
                f"parts ({parts}), or '' for all of it"
            )
        self._gates = find_gates(model)
        self._blocks: dict[str, dict[str, GatedConv]] = {}
        self._own_gates: dict[str, list[str]] = {}
        for block, sites in block_sites(model).items():
            self._blocks[block] = gated_convs(self._modules[block], sites, block)
            self._own_gates[block] = [full_name(block, site.gate) for site in sites]
        self._layers = self._find_layers(backbone)
        self._attached = Attachments()
        self.reset()

    def reset(self) -> None:
        """Forget everything counted so far."""
        # MACs of the batch: [in the backbone, outside] each.
        self._plain = [0, 0]
        self._overhead = [0, 0]
        self._calls: list[_GatedCall] = []
        self._masks: list[Tensor] = []
        self._masks_of: dict[str, list[int]] = {name: [] for name in self._gates}
        self._open: dict[str, list[int]] = {}

    def attach(self) -> None:
        """Start counting."""
        if self._attached:
            return
        for name in self._layers:
            self._attached.after(self._modules[name], partial(self._on_layer, name), passive=True)
        for name in self._blocks:
            module = self._modules[name]
            self._attached.before(module, partial(self._before_block, name), passive=True)
            self._attached.after(module, partial(self._after_block, name), passive=True)

    def detach(self) -> None:
        """Stop counting."""
        self._attached.remove()

    def take(self, batch_size: int) -> list[ImageMACs]:
        """What was counted since the last time, shared out to the images.

        The MACs of gated convolutions are known image by image, all others are
        the same for every image of a batch (a head's work on the proposals of a
        batch is shared out evenly).

        Args:
            batch_size (int): Number of images the passes were about.

        Returns:
            list[ImageMACs]: One for each image.
        """
        masks = self._masks_to_cpu()
        executed = torch.zeros(batch_size, 2, dtype=torch.float64)
        dense = torch.zeros_like(executed)
        for side in (0, 1):
            executed[:, side] += (self._plain[side] + self._overhead[side]) / batch_size
            dense[:, side] += self._plain[side] / batch_size
        for call in self._calls:
            side = 0 if call.layer.in_backbone else 1
            share = open_share(
                None if call.in_mask is None else masks[call.in_mask],
                None if call.out_mask is None else masks[call.out_mask],
                call.layer.groups,
            )
            per_image = _by_image(share, batch_size).mean(dim=1)
            executed[:, side] += call.macs / batch_size * per_image
            dense[:, side] += call.macs / batch_size
        gates = tuple((name, gate.channels) for name, gate in self._gates.items())
        passes, packed = self._pack(masks, batch_size)
        self.reset()
        return [
            ImageMACs(
                backbone_executed=float(executed[i, 0]),
                backbone_dense=float(dense[i, 0]),
                model_executed=float(executed[i].sum()),
                model_dense=float(dense[i].sum()),
                gates=gates,
                decisions=((passes, packed[i]),) if gates else (),
            )
            for i in range(batch_size)
        ]

    def _find_layers(self, backbone: str) -> dict[str, _Layer]:
        gated = {conv: plan for convs in self._blocks.values() for conv, plan in convs.items()}
        inside_gates = {id(module) for gate in self._gates.values() for module in gate.modules()}
        inside_backbone = {id(module) for module in self._modules[backbone].modules()}
        return {
            name: _Layer(
                in_backbone=id(module) in inside_backbone,
                is_gate=id(module) in inside_gates,
                groups=getattr(module, 'groups', 1),
                gated=gated.get(name),
            )
            for name, module in self._modules.items()
            if is_counted(module)
        }

    def _on_layer(self, name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        layer = self._layers[name]
        macs = call_macs(module, args, output)
        if layer.gated is not None:
            self._open.setdefault(name, []).append(macs)
            return
        total = self._overhead if layer.is_gate else self._plain
        total[0 if layer.in_backbone else 1] += macs

    def _before_block(self, name: str, *_: Any) -> None:
        for gate in self._own_gates[name]:
            self._gates[gate].record = None

    def _after_block(self, name: str, *_: Any) -> None:
        masks: dict[Optional[str], Optional[int]] = {None: None}
        for gate in self._own_gates[name]:
            record = self._gates[gate].record
            if record is None:
                raise RuntimeError(
                    f'gate {gate!r} left no record although its block ran; the block must call it '
                    'in every pass'
                )
            masks[gate] = len(self._masks)
            self._masks_of[gate].append(len(self._masks))
            self._masks.append(record.mask)
        for conv, plan in self._blocks[name].items():
            if conv not in self._open:
                raise RuntimeError(
                    f'the gated convolution {conv!r} did not run as a module, so its MACs cannot '
                    'be counted; count with the gates in mask mode'
                )
            for macs in self._open.pop(conv):
                self._calls.append(
                    _GatedCall(macs, self._layers[conv], masks[plan.in_gate], masks[plan.out_gate])
                )

    def _masks_to_cpu(self) -> list[Tensor]:
        """All masks in one transfer."""
        if not self._masks:
            return []
        flat = torch.cat([mask.detach().flatten() != 0 for mask in self._masks]).cpu()
        sizes = [mask.numel() for mask in self._masks]
        parts = flat.split(sizes)
        return [part.view(mask.shape) for part, mask in zip(parts, self._masks, strict=True)]

    def _pack(self, masks: list[Tensor], batch_size: int) -> tuple[tuple[int, ...], list[bytes]]:
        passes, columns = [], []
        for name in self._gates:
            rows = [_by_image(masks[i], batch_size) for i in self._masks_of[name]]
            passes.append(sum(row.size(1) for row in rows))
            columns += [row.reshape(batch_size, -1) for row in rows]
        if not columns:
            return tuple(passes), [b''] * batch_size
        bits = np.packbits(torch.cat(columns, dim=1).numpy(), axis=1)
        return tuple(passes), [row.tobytes() for row in bits]


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
            'multiples can be attributed to images'
        )
    return values.reshape(batch_size, -1, *values.shape[1:])
