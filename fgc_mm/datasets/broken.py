# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Saying which file it was when a picture cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Optional

import cv2
import numpy as np
from PIL import Image

from .instance_index import _children

_KEYS = ('img_path', 'seg_map_path')


class BrokenPictureError(RuntimeError):
    """A picture or label map that is missing, empty or damaged; names its file."""


def picture_fault(path: str) -> Optional[str]:
    """What is wrong with a picture file.

    Args:
        path (str): A file on a local disk.

    Returns:
        str: The message; None if the picture can be read.
    """
    if not os.path.isfile(path):
        return f'picture {path} does not exist; the dataset is incomplete: unpack it again'
    size = os.path.getsize(path)
    if not size:
        return f'picture {path} is empty (0 bytes); the dataset is damaged: fetch the file again'
    if _decodes(path):
        return None
    return (
        f'picture {path} ({size} bytes) cannot be decoded: it is cut short, damaged or no picture; '
        'fetch the file again or take it out of the dataset'
    )


def _decodes(path: str) -> bool:
    if cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_UNCHANGED) is not None:
        return True
    try:
        with Image.open(path) as image:
            image.load()
    except Exception:  # PIL raises many kinds, struct.error and SyntaxError among them
        return False
    return True


class NamingPipeline:
    """A pipeline that tells which file was broken when it fails.

    Args:
        pipeline (Callable): The pipeline of a dataset.
    """

    def __init__(self, pipeline: Callable) -> None:
        self.pipeline = pipeline

    def __call__(self, data: Any) -> Any:
        info = data if isinstance(data, Mapping) else {}
        # Taken before a transform changes them.
        paths = [info[key] for key in _KEYS if _is_local(info.get(key))]
        try:
            return self.pipeline(data)
        except Exception as error:
            for path in paths:
                fault = picture_fault(path)
                if fault is not None:
                    raise BrokenPictureError(fault) from error
            raise

    def __getattr__(self, name: str) -> Any:
        if name == 'pipeline' or name.startswith('__'):  # not there while it is unpickled
            raise AttributeError(name)
        return getattr(self.pipeline, name)

    def __repr__(self) -> str:
        return repr(self.pipeline)


def name_broken_pictures(dataset: Any) -> None:
    """Let a dataset, and all inside it, name the file of a broken picture.

    Args:
        dataset (Dataset): A dataset of mmengine's kind; others stay as they are.
    """
    attributes = getattr(dataset, '__dict__', {})
    pipeline = attributes.get('pipeline')
    if callable(pipeline) and not isinstance(pipeline, NamingPipeline):
        dataset.pipeline = NamingPipeline(pipeline)
    for child in _children(dataset) if attributes else ():
        name_broken_pictures(child)


def _is_local(path: Any) -> bool:
    return isinstance(path, str) and bool(path) and '://' not in path
