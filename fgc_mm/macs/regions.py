# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Whose regions they are that a head of a detector works on."""

from __future__ import annotations

from typing import Any, Optional

import torch.nn as nn
from torch import Tensor

from ..runtime import Attachments


class Regions:
    """Watches the RoI extractors of a model: they are told the picture of every region.

    An extractor, as mmdet has them, is a module with ``roi_layers`` that is called with feature
    maps and regions; the first column of these is the number of the picture. The layers of the
    head it belongs to work on the regions it was given last.

    Args:
        model (nn.Module): Any model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._extractors = {}
        for name, module in model.named_modules():
            if hasattr(module, 'roi_layers'):
                head, _, last = name.rpartition('.')
                if last.isdigit():  # one of several
                    head = head.rpartition('.')[0]
                self._extractors[name] = head, module
        self._last: dict[str, Tensor] = {}

    def attach(self, attached: Attachments) -> None:
        """Start watching.

        Args:
            attached (Attachments): Who takes the hooks off again.
        """

        def note(head: str) -> Any:
            def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
                rois = kwargs['rois'] if 'rois' in kwargs else args[1]
                self._last[head] = rois[:, 0]

            return before

        for head, module in self._extractors.values():
            attached.before(module, note(head), with_kwargs=True)

    def reset(self) -> None:
        """Forget what was seen: a pass begins."""
        self._last.clear()

    def owners(self, layer: str, rows: int) -> Optional[Tensor]:
        """The number of the picture of each row a layer has worked on, None if they are no regions.

        Args:
            layer (str): Its name.
            rows (int): How many rows there are.
        """
        for head, owners in self._last.items():
            if layer.startswith(f'{head}.' if head else '') and len(owners) == rows:
                return owners
        return None
