# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Saying which file it was when a picture cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Optional

import cv2
import numpy as np
from PIL import Image

from ..errors import DataError
from ..tasks import file_format, task_of_dataset
from .mixing import children_of

_KEYS = ('img_path', 'seg_map_path')


def picture_fault(path: str, strict: bool = False) -> Optional[str]:
    """What is wrong with a picture file; None if it can be read.

    Args:
        path (str): A file on a local disk.
        strict (bool): Whether Pillow has to read it, as mmseg reads label maps
            with; OpenCV forgives more. Defaults to False.
    """
    if not os.path.isfile(path):
        return f'picture {path} does not exist; the dataset is incomplete: unpack it again'
    size = os.path.getsize(path)
    if not size:
        return f'picture {path} is empty (0 bytes); the dataset is damaged: fetch the file again'
    if _decodes(path, strict):
        return None
    return (
        f'picture {path} ({size} bytes) cannot be decoded: it is cut short, damaged or no picture; '
        'fetch the file again or take it out of the dataset'
    )


def _decodes(path: str, strict: bool) -> bool:
    if not strict and cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_UNCHANGED) is not None:
        return True
    try:
        with Image.open(path) as image:
            image.load()
    except Exception:  # PIL raises many kinds, struct.error and SyntaxError among them
        return False
    return True


def _check_label_map(
    sample: Any, path: str, classes: Optional[int], ignored: Collection[int]
) -> None:
    """See that the label map of a packed item fits its picture and, if known, the classes."""
    labels = sample.gt_sem_seg.data
    if labels.dim() != 3 or labels.size(0) != 1:
        raise DataError(
            f'label map {path} has the shape {tuple(labels.squeeze().shape)} instead of one class '
            'number for each pixel, height x width; is it a color picture? Convert it'
        )
    size, meta = tuple(labels.shape[1:]), sample.metainfo
    sizes = {tuple(meta[key][:2]) for key in ('img_shape', 'ori_shape') if key in meta}
    if sizes and size not in sizes:
        raise _other_size(path, size, sizes)
    if not classes:
        return
    # Not unique(), which sorts all pixels.
    found = labels.flatten().bincount().nonzero().flatten().tolist()
    wrong = [value for value in found if value >= classes and value not in ignored]
    if wrong:
        known = ' and '.join(map(str, sorted(ignored)))
        raise DataError(
            f'label map {path} has the value {wrong[0]}, but the dataset has {classes} classes (0 '
            f'to {classes - 1}, and {known} for none); convert its labels, or give '
            'metainfo.classes all classes'
        )


def _check_sizes(picture: str, label_map: str) -> None:
    """See that picture and label map, both readable, are of one size."""
    sizes = []
    for path in (picture, label_map):
        with Image.open(path) as image:
            sizes.append(image.size[::-1])
    if sizes[0] != sizes[1]:
        raise _other_size(label_map, sizes[1], sizes[:1])


def _other_size(path: str, size: tuple, sizes: Collection[tuple]) -> DataError:
    return DataError(
        f'label map {path} does not have the size of its picture: {size[0]} x {size[1]} where '
        f'the picture has {" or ".join(f"{h} x {w}" for h, w in sorted(sizes))} pixels'
    )


class NamingPipeline:
    """A pipeline that tells which file was broken when it fails.

    ``labels`` are the ``classes`` and ``ignored`` values of a segmentation dataset, whose label
    maps are looked at; ``boxes`` says whether those of a packed item must have an inside.
    """

    def __init__(self, pipeline: Callable, labels: Optional[dict[str, Any]], boxes: bool) -> None:
        self.pipeline = pipeline
        self.labels = labels
        self.boxes = boxes

    def __call__(self, data: Any) -> Any:
        info = data if isinstance(data, Mapping) else {}
        # Taken before a transform changes them.
        paths = [info[key] for key in _KEYS if _is_local(info.get(key))]
        label_path = str(info.get('seg_map_path'))
        xml_path = info.get('xml_path') or info.get('img_path')
        try:
            packed = self.pipeline(data)
        except Exception as error:
            for path in paths:
                fault = picture_fault(path, strict=path == label_path)
                if fault is not None:
                    raise DataError(fault) from error
            if self.labels is not None and len(paths) == len(_KEYS):
                _check_sizes(*paths)
            raise
        sample = packed.get('data_samples') if isinstance(packed, Mapping) else None
        if self.labels is not None and sample is not None and 'gt_sem_seg' in sample:
            _check_label_map(sample, label_path, **self.labels)
        if self.boxes and sample is not None and _has_flat_box(sample):
            raise DataError(
                f'annotation {xml_path}: a box lies beyond its picture, or has no inside once '
                'that is resized; mend the file or take it out of the dataset'
            )
        return packed

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') or 'pipeline' not in vars(self):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.pipeline, name)

    def __repr__(self) -> str:
        return repr(self.pipeline)


def name_broken_pictures(dataset: Any, ignored: Collection[int] = (255,)) -> None:
    """Let a dataset, and all inside it, name the file of a broken picture.

    Args:
        dataset (Dataset): A dataset of mmengine's kind; others stay as they are.
        ignored (Collection[int]): Values of label maps that stand for no class.
            Defaults to (255,).
    """
    pipeline = getattr(dataset, '__dict__', {}).get('pipeline')
    if callable(pipeline) and not isinstance(pipeline, NamingPipeline):
        labels = None
        if task_of_dataset(dataset).label_maps:
            classes = (getattr(dataset, 'metainfo', None) or {}).get('classes')
            labels = dict(classes=len(classes or ()) or None, ignored=tuple(ignored))
        # Those of COCO's form are sorted out by mmdet.
        voc = any(file_format(base) == 'voc' for base in type(dataset).__mro__)
        boxes = voc and not getattr(dataset, 'test_mode', False)
        dataset.pipeline = NamingPipeline(pipeline, labels, boxes)
    for child in children_of(dataset):
        name_broken_pictures(child, ignored)


def _has_flat_box(sample: Any) -> bool:
    boxes = getattr(sample.get('gt_instances'), 'bboxes', None)
    boxes = getattr(boxes, 'tensor', boxes)
    if boxes is None or boxes.size(-1) != 4:
        return False
    # Not `<=`: NaN is no size either.
    return not bool((boxes[:, 2:] > boxes[:, :2]).all())


def _is_local(path: Any) -> bool:
    return isinstance(path, str) and bool(path) and '://' not in path
