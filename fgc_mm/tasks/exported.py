# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a model of each task is exported as: pictures in, tensors by name out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch.nn.functional as F
from torch import Tensor

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """A part of a model that can be exported.

    Attributes:
        name (str): What the file says it is, such as 'classifier'.
        run (Callable): From the model and B x 3 x H x W to name -> output, by operations that a
            graph can hold.
        not_exported (Sequence[str]): What a user would miss.
        reference (Callable, optional): The same by the model's own way, to compare with.
            Defaults to None, ``run``.
    """

    name: str
    run: Callable[[Any, Tensor], Outputs]
    not_exported: Sequence[str] = ()
    reference: Optional[Callable[[Any, Tensor], Outputs]] = None


def levels(name: str, maps: Sequence[Tensor]) -> Outputs:
    """One output for each map."""
    return {f'{name}_{i}': out for i, out in enumerate(maps)}


def classifier(model: Any) -> Part:
    """Scores of an mmpretrain model."""
    return Part(
        'classifier',
        lambda model, x: dict(scores=model(x, mode='tensor')),
        ['softmax: `scores` are what it is taken of'],
    )


def segmentor(model: Any) -> Part:
    """Logits of an mmseg model, as large as the picture."""
    missing = ['the class of each pixel (argmax over `logits`), and scaling back']
    if (model.test_cfg or {}).get('mode') == 'slide':
        missing.append('sliding windows: the graph sees the image as a whole')
    return Part('segmentor', _logits, missing, _logits_of_mmseg)


def _logits(model: Any, x: Tensor) -> Outputs:
    logits = model(x, mode='tensor')
    # F.interpolate, as mmseg's own resize warns about sizes it cannot know.
    return dict(logits=F.interpolate(logits, x.shape[2:], None, 'bilinear', model.align_corners))


def _logits_of_mmseg(model: Any, x: Tensor) -> Outputs:
    size = tuple(x.shape[2:])
    meta = dict(img_shape=size, ori_shape=size, pad_shape=size, padding_size=[0] * 4)
    return dict(logits=model.encode_decode(x, [meta] * len(x)))


def detector(model: Any) -> Optional[Part]:
    """Maps of an mmdet model: those of its RPN, or of its dense head."""
    if getattr(model, 'rpn_head', None) is not None:
        missing = [
            'anchors, box decoding and NMS of the RPN',
            'the RoI head (upstream chooses pyramid levels and proposals in Python)',
        ]
        return Part('twostage', _rpn_maps, missing)
    # A dense head takes feature maps and gives maps; DETR's takes queries. Told by the name of
    # mmdet's base class, since mmdet is not imported here.
    if any(kind.__name__ == 'BaseDenseHead' for kind in type(model.bbox_head).__mro__):
        return Part('singlestage', _dense_maps, ['anchors or points, box decoding and NMS'])
    return None


def _rpn_maps(model: Any, x: Tensor) -> Outputs:
    feats = model.extract_feat(x)
    scores, boxes = model.rpn_head(feats)
    return {
        **levels('feature', feats),
        **levels('rpn_cls_score', scores),
        **levels('rpn_bbox_pred', boxes),
    }


def _dense_maps(model: Any, x: Tensor) -> Outputs:
    outs = model.bbox_head(model.extract_feat(x))
    names = [f'head_{i}' for i in range(len(outs))]
    if len(outs) > 1:  # YOLOv3's has one kind of maps
        names[:2] = 'cls_score', 'bbox_pred'
    found: Outputs = {}
    for name, maps in zip(names, outs, strict=True):
        found.update(levels(name, maps))
    return found
