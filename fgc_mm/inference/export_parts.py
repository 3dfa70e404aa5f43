# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What of a model is exported: pictures in, a flat tuple of tensors out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError
from ..gates import find_gates
from ..tasks import task_of_model
from ..tasks.exported import Outputs, Part, levels

PARTS = ('model', 'backbone')


def _backbone(name: str, model: nn.Module, x: Tensor) -> Outputs:
    outs = model.get_submodule(name)(x)
    if isinstance(outs, Mapping):
        return dict(outs)
    return levels('feature', [outs] if isinstance(outs, Tensor) else outs)


def backbone_name(model: nn.Module) -> str:
    """Name of the backbone in a model, '' for a network that has none."""
    return 'backbone' if isinstance(getattr(model, 'backbone', None), nn.Module) else ''


def find_part(model: nn.Module, part: str = 'model') -> Part:
    """The part of a model to export.

    Args:
        model (nn.Module): An mmdet, mmseg or mmpretrain model, or any network.
        part (str): 'model', as far as its heads can be exported, or
            'backbone'. Defaults to 'model'.

    Raises:
        UsageError: If it has a head that cannot be exported.
    """
    if part not in PARTS:
        raise UsageError(f'part={part!r} must be one of {PARTS}')
    backbone = backbone_name(model)
    if part == 'backbone' or not backbone:
        return Part('backbone', partial(_backbone, backbone))
    found = task_of_model(model).exported(model)
    if found is None:
        raise UsageError(
            f'the model {type(model).__name__} is no segmentor, classifier, nor detector with an '
            'rpn_head or a dense bbox_head, whose outputs could be exported: export its backbone '
            'alone (--part backbone)'
        )
    return found


@dataclass
class Preprocessing:
    """What happens to a picture before the network sees it.

    Attributes:
        mean (list[float]): Subtracted from each channel, after the reversal.
        std (list[float]): Then divided by.
        bgr_to_rgb (bool): Whether the channels are reversed, first of all.
        pad_size_divisor (int): Height and width are padded, at the bottom and
            on the right, to a multiple of this, last of all.
        pad_value (float): With what.
    """

    mean: list[float] = field(default_factory=lambda: [0.0])
    std: list[float] = field(default_factory=lambda: [1.0])
    bgr_to_rgb: bool = False
    pad_size_divisor: int = 1
    pad_value: float = 0.0

    @classmethod
    def of(cls, preprocessor: Any) -> Preprocessing:
        """That of a data preprocessor of mmdet, mmseg or mmpretrain, or of None."""
        result = cls()
        if getattr(preprocessor, '_enable_normalize', False):
            result.mean = [float(value) for value in preprocessor.mean.flatten()]
            result.std = [float(value) for value in preprocessor.std.flatten()]
        result.bgr_to_rgb = any(
            getattr(preprocessor, name, False) for name in ('_channel_conversion', 'to_rgb')
        )
        if hasattr(preprocessor, 'size_divisor'):  # mmseg's pads in testing if test_cfg says so
            divisor = (preprocessor.test_cfg or {}).get('size_divisor')
        else:
            divisor = getattr(preprocessor, 'pad_size_divisor', None)
        result.pad_size_divisor = int(divisor or 1)
        result.pad_value = float(getattr(preprocessor, 'pad_value', 0))
        return result

    def __call__(self, pictures: Tensor) -> Tensor:
        """Apply it to B x 3 x H x W, values from 0 to 255."""
        x = pictures.float()
        if self.bgr_to_rgb:
            x = x.flip(1)
        mean, std = (torch.tensor(v).view(-1, 1, 1).to(x) for v in (self.mean, self.std))
        x = (x - mean) / std
        if self.pad_size_divisor > 1:
            down, right = (-side % self.pad_size_divisor for side in x.shape[2:])
            x = F.pad(x, (0, right, 0, down), value=self.pad_value)
        return x


class Recorded(nn.Module):
    """What is recorded: a part, and what is put before and behind it.

    Args:
        model (nn.Module): The model.
        part (Part): Its part.
        preprocessing (Preprocessing, optional): To put before it. None for nothing.
        with_gates (bool): Whether the masks are outputs too.
    """

    def __init__(
        self,
        model: nn.Module,
        part: Part,
        preprocessing: Optional[Preprocessing],
        with_gates: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.part = part
        self.preprocessing = preprocessing
        self.with_gates = with_gates
        self.names: list[str] = []

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """All outputs in the order of ``names``."""
        outs = self._outputs(self.part.run, image)
        self.names = list(outs)
        return tuple(outs.values())

    def reference(self, image: Tensor) -> Outputs:
        """The same by the model's own way."""
        return self._outputs(self.part.reference or self.part.run, image)

    def _outputs(self, run: Callable[[Any, Tensor], Outputs], image: Tensor) -> Outputs:
        x = image if self.preprocessing is None else self.preprocessing(image)
        outs = run(self.model, x)
        masks = _take_masks(self.model)
        return {**outs, **masks} if self.with_gates else outs


def _take_masks(model: nn.Module) -> Outputs:
    """The masks of the last pass, by the names they have as outputs; the gates forget the pass:
    torch.export refuses modules that keep tensors of one."""
    masks = {}
    for name, gate in find_gates(model).items():
        record = gate.pass_record
        if record is not None:
            masks[f'gate.{name}'] = record.mask
        gate.record, gate.multiplier, gate.records = None, None, []
    return masks


@contextmanager
def recordable(model: nn.Module) -> Iterator[None]:
    """Have a model compute with operations that an exported graph can hold: adaptive average
    pooling as a product of matrices, which needs no fixed image size."""
    pools = [m for m in model.modules() if type(m) is nn.AdaptiveAvgPool2d and _splits(m)]
    _take_masks(model)
    try:
        for pool in pools:
            pool.forward = partial(matrix_pool, pool.output_size)  # type: ignore[method-assign]
        yield
    finally:
        for pool in pools:
            pool.__dict__.pop('forward', None)


def _splits(pool: nn.AdaptiveAvgPool2d) -> bool:
    """Whether a pooling gives more than the mean of the whole map."""
    size = pool.output_size
    return any(side not in (1, None) for side in (size if isinstance(size, tuple) else (size,)))


def matrix_pool(output_size: Any, x: Tensor) -> Tensor:
    """Adaptive average pooling for image sizes that are not known yet.

    A cell is the mean of rows ``floor(i H / n)`` to ``ceil((i + 1) H / n)``, and
    of columns alike; both means are products with a matrix.

    Args:
        output_size (int | tuple): As of :class:`torch.nn.AdaptiveAvgPool2d`.
        x (Tensor): B x C x H x W.
    """
    height, width = output_size if isinstance(output_size, tuple) else (output_size, output_size)
    if width is not None:
        x = x @ _means(x, 3, width).transpose(0, 1)
    return x if height is None else _means(x, 2, height) @ x


def _means(x: Tensor, dim: int, cells: int) -> Tensor:
    """cells x length, rows that take the mean of a cell."""
    length = x.shape[dim]
    cell = torch.arange(cells, device=x.device)[:, None]
    place = torch.arange(length, device=x.device)[None]
    # floor and ceil of quotients, in whole numbers
    begin = cell * length // cells
    end = ((cell + 1) * length + cells - 1) // cells
    inside = ((place >= begin) & (place < end)).to(x.dtype)
    return inside / inside.sum(dim=1, keepdim=True)
