# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What of a model is exported: pictures in, a flat tuple of tensors out."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError
from ..tasks import task_of_model
from .export_graph import take_masks

PARTS = ('model', 'backbone')


class Part(nn.Module):
    """A part of a model that can be exported.

    Args:
        model (nn.Module): The task model, or a backbone.
        backbone (str): Name of the backbone in it, '' for all of it.

    Attributes:
        not_exported (list[str]): What a user would miss.
    """

    def __init__(self, model: nn.Module, backbone: str) -> None:
        super().__init__()
        self.model = model
        self.backbone = backbone
        self.not_exported: list[str] = []

    @abstractmethod
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Name -> output, by operations that a graph can hold."""

    def reference(self, x: Tensor) -> dict[str, Tensor]:
        """The same by the model's own way, to compare with."""
        return self.forward(x)

    def levels(self, name: str, maps: Sequence[Tensor]) -> dict[str, Tensor]:
        """Names for maps of several sizes."""
        return {f'{name}_{i}': out for i, out in enumerate(maps)}


class BackbonePart(Part):
    """The backbone alone."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outs = self.model.get_submodule(self.backbone)(x)
        if isinstance(outs, Mapping):
            return dict(outs)
        return self.levels('feature', [outs] if isinstance(outs, Tensor) else outs)


class ClassifierPart(Part):
    """From pictures to class scores."""

    def __init__(self, model: nn.Module, backbone: str) -> None:
        super().__init__(model, backbone)
        self.not_exported = ['softmax: `scores` are what it is taken of']

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return dict(scores=self.model(x, mode='tensor'))


class SegmentorPart(Part):
    """From pictures to the logits of each pixel."""

    def __init__(self, model: nn.Module, backbone: str) -> None:
        super().__init__(model, backbone)
        self.not_exported = ['the class of each pixel (argmax over `logits`), and scaling back']
        test_cfg: Any = model.test_cfg
        if (test_cfg or {}).get('mode') == 'slide':
            self.not_exported.append('sliding windows: the graph sees the image as a whole')

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.model(x, mode='tensor')
        # F.interpolate, as mmseg's own resize warns about sizes it cannot know.
        align = self.model.align_corners
        return dict(logits=F.interpolate(logits, x.shape[2:], None, 'bilinear', align))

    def reference(self, x: Tensor) -> dict[str, Tensor]:
        size = tuple(x.shape[2:])
        meta = dict(img_shape=size, ori_shape=size, pad_shape=size, padding_size=[0] * 4)
        return dict(logits=self.model.encode_decode(x, [meta] * len(x)))  # type: ignore[operator]


class TwoStagePart(Part):
    """From pictures to the neck's features and the maps of the RPN."""

    def __init__(self, model: nn.Module, backbone: str) -> None:
        super().__init__(model, backbone)
        self.not_exported = [
            'anchors, box decoding and NMS of the RPN',
            'the RoI head (upstream chooses pyramid levels and proposals in Python)',
        ]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        feats = self.model.extract_feat(x)  # type: ignore[operator]
        scores, boxes = self.model.rpn_head(feats)  # type: ignore[operator]
        return {
            **self.levels('feature', feats),
            **self.levels('rpn_cls_score', scores),
            **self.levels('rpn_bbox_pred', boxes),
        }


class SingleStagePart(Part):
    """From pictures to the maps of a dense head."""

    def __init__(self, model: nn.Module, backbone: str) -> None:
        super().__init__(model, backbone)
        self.not_exported = ['anchors or points, box decoding and NMS']

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        feats = self.model.extract_feat(x)  # type: ignore[operator]
        outs = self.model.bbox_head(feats)  # type: ignore[operator]
        names = [f'head_{i}' for i in range(len(outs))]
        if len(outs) > 1:  # YOLOv3's has one kind of maps
            names[:2] = 'cls_score', 'bbox_pred'
        return {
            key: out
            for name, maps in zip(names, outs, strict=True)
            for key, out in self.levels(name, maps).items()
        }


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
    kind = type(model).__name__
    backbone = getattr(model, 'backbone', None)
    if not isinstance(backbone, nn.Module):
        return BackbonePart(model, '')
    if part == 'backbone':
        return BackbonePart(model, 'backbone')
    find = MODEL_PARTS.get(task_of_model(model).name)
    found = find(model) if find is not None else None
    if found is not None:
        return found(model, 'backbone')
    raise UsageError(
        f'the model {kind} is no segmentor, classifier, nor detector with an rpn_head or a dense '
        'bbox_head, whose outputs could be exported: export its backbone alone (--part backbone)'
    )


def _detector_part(model: Any) -> Optional[type[Part]]:
    if getattr(model, 'rpn_head', None) is not None:
        return TwoStagePart
    # A dense head takes feature maps and gives maps; DETR's takes queries. Told by the name of
    # mmdet's base class, since mmdet is not imported here.
    kinds = type(model.bbox_head).__mro__
    return SingleStagePart if any(kind.__name__ == 'BaseDenseHead' for kind in kinds) else None


MODEL_PARTS: dict[str, Callable[[Any], Optional[type[Part]]]] = {
    'classification': lambda model: ClassifierPart,
    'detection': _detector_part,
    'segmentation': lambda model: SegmentorPart,
}
"""Name of a task -> what a model of it is exported as, None if it cannot be."""


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
    def of(cls, preprocessor: Optional[nn.Module]) -> Preprocessing:
        """That of a data preprocessor of mmdet, mmseg or mmpretrain."""
        own: Any = preprocessor
        result = cls()
        if getattr(own, '_enable_normalize', False):
            result.mean = [float(value) for value in own.mean.flatten()]
            result.std = [float(value) for value in own.std.flatten()]
        result.bgr_to_rgb = bool(
            getattr(own, '_channel_conversion', False) or getattr(own, 'to_rgb', False)
        )
        if hasattr(own, 'size_divisor'):  # mmseg's pads in testing if test_cfg says so
            divisor = (own.test_cfg or {}).get('size_divisor')
        else:
            divisor = getattr(own, 'pad_size_divisor', None)
        result.pad_size_divisor = int(divisor or 1)
        result.pad_value = float(getattr(own, 'pad_value', 0))
        return result

    def __call__(self, pictures: Tensor) -> Tensor:
        """Apply it.

        Args:
            pictures (Tensor): B x 3 x H x W, values from 0 to 255.
        """
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
        part (Part): The part.
        preprocessing (Preprocessing, optional): To put before it.
            Defaults to None.
        with_gates (bool): Whether the masks are outputs too.
            Defaults to False.
    """

    def __init__(
        self,
        part: Part,
        preprocessing: Optional[Preprocessing] = None,
        with_gates: bool = False,
    ) -> None:
        super().__init__()
        self.part = part
        self.preprocessing = preprocessing
        self.with_gates = with_gates
        self.names: list[str] = []

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """All outputs in the order of ``names``."""
        x = image if self.preprocessing is None else self.preprocessing(image)
        outs = self.part(x)
        masks = take_masks(self.part.model)
        if self.with_gates:
            outs = {**outs, **gate_outputs(masks)}
        self.names = list(outs)
        return tuple(outs.values())


def gate_outputs(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks of gates by the names they have as outputs."""
    return {f'gate.{name}': mask for name, mask in masks.items()}


def other_size(x: Tensor) -> Tensor:
    """Pictures that are less high and wider: 3/4 and 5/4."""
    height, more = math.ceil(0.75 * x.shape[2]), math.ceil(0.25 * x.shape[3])
    return torch.cat([x, x[..., :more]], dim=3)[:, :, :height].contiguous()
