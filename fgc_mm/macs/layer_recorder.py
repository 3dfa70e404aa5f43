# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which layers of a model run, on how much, and under which decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from ..gates import GateRecord, find_gates
from ..runtime import Attachments
from .formulas import call_macs, is_counted
from .switches import switches_of


@dataclass
class Call:
    """One call of a layer.

    Attributes:
        layer (str): Its name.
        macs (int): Dense MACs, over all rows.
        rows (int): How many pictures, windows or regions it worked on.
        owners (Tensor, optional): The number of the picture of each row, if these are regions.
        records (dict): The gates that switch it -> what they had decided.
    """

    layer: str
    macs: int
    rows: int
    owners: Optional[Tensor]
    records: dict[str, GateRecord] = field(default_factory=dict)

    def images(self, batch: int, device: torch.device) -> Tensor:
        """The number of the picture of each row."""
        if self.owners is not None:
            return self.owners.detach().long()
        return torch.arange(self.rows, device=device) * batch // self.rows


class LayerRecorder:
    """Writes down the calls of a model's convolutions and linear layers.

    The output size of each layer is read off its calls, so any image size,
    windows of an image and repeated layers are seen as they happen.

    A RoI extractor, as mmdet has them, is a module with ``roi_layers`` that is called with feature
    maps and regions; the first column of these is the number of the picture. The layers of the
    head it belongs to work on the regions it was given last.

    Args:
        model (nn.Module): Any model.
        backbone (str): Name of the part that is the backbone; '' means the
            whole model. Defaults to ''.

    Attributes:
        layers (dict): Name of each layer that counts -> whether it is in the backbone, whether it
            is a gate's own.
        calls (list[Call]): What was seen.

    Raises:
        UsageError: If there is no such part.
    """

    def __init__(self, model: nn.Module, backbone: str = '') -> None:
        self._modules = modules = dict(model.named_modules())
        if backbone not in modules:
            parts = ', '.join(repr(name) for name, _ in model.named_children())
            raise UsageError(
                f'backbone={backbone!r} is no part of {type(model).__name__}; name one of its '
                f"parts ({parts}), or '' for all of it"
            )
        self.backbone = modules[backbone]
        self.gates = find_gates(model)
        self.switches = switches_of(model)
        inside = {id(module) for module in self.backbone.modules()}
        own = {id(m) for gate in self.gates.values() for m in gate.modules()}
        self.layers = {
            name: (id(module) in inside, id(module) in own)
            for name, module in modules.items()
            if is_counted(module)
        }
        self.calls: list[Call] = []
        self._regions: dict[str, Tensor] = {}
        self._attached = Attachments()

    def attach(self) -> None:
        """Start watching."""
        if self._attached:
            return
        for name, module in self._modules.items():
            if hasattr(module, 'roi_layers'):
                head, _, last = name.rpartition('.')
                if last.isdigit():  # one of several
                    head = head.rpartition('.')[0]
                self._attached.before(module, partial(self._on_regions, head), with_kwargs=True)
        for name in self.layers:
            self._attached.after(self._modules[name], partial(self._on_layer, name))

    def detach(self) -> None:
        """Stop watching."""
        self._attached.remove()

    def reset(self) -> None:
        """Forget everything seen so far."""
        self.calls = []
        self._regions.clear()

    def _on_regions(self, head: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        rois = kwargs['rois'] if 'rois' in kwargs else args[1]
        self._regions[head] = rois[:, 0]

    def _on_layer(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        rows = len(output)
        owners = None
        for head, regions in self._regions.items():
            if name.startswith(f'{head}.' if head else '') and len(regions) == rows:
                owners = regions
                break
        self.calls.append(Call(name, call_macs(module, args, output), rows, owners))
