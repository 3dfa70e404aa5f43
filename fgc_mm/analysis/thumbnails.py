# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The pictures themselves, small."""

from __future__ import annotations

import base64
import copy
import os
from collections.abc import Sequence
from typing import Any

import cv2
import mmcv
import numpy as np
from mmengine.config import Config

from ..errors import FgcError
from ..runtime import launch
from .gate_table import GateTable
from .gather import build_dataset


class Thumbnails:
    """Reads pictures of a table from their files, or from the dataset."""

    def __init__(self, cfg: Config, table: GateTable, size: int = 96) -> None:
        self.cfg, self.table, self.size = cfg, table, size
        self._dataset: Any = None
        self._known: dict[int, np.ndarray] = {}

    def read(self, number: int) -> np.ndarray:
        """A picture, H x W x 3 in RGB."""
        if number not in self._known:
            path = self.table.paths[number]
            if os.path.isfile(path):
                picture = mmcv.imread(path, channel_order='rgb')
            else:
                try:
                    picture = self._from_dataset(int(self.table.positions[number]))
                except (FgcError, OSError):  # the data is elsewhere now
                    picture = np.full((32, 32, 3), 128, np.uint8)
            scale = self.size / max(picture.shape[:2])
            if scale < 1:
                height, width = (max(1, round(n * scale)) for n in picture.shape[:2])
                picture = cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA)
            self._known[number] = picture
        return self._known[number]

    def uri(self, number: int) -> str:
        """The picture as a ``data:`` address."""
        done, data = cv2.imencode(
            '.jpg', self.read(number)[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 80]
        )
        assert done
        return 'data:image/jpeg;base64,' + base64.b64encode(data.tobytes()).decode()

    def _from_dataset(self, position: int) -> np.ndarray:
        if self._dataset is None:
            split = self.table.info['split']
            cfg = copy.deepcopy(self.cfg)
            launch.prepare_data(cfg, (split,))
            self._dataset = build_dataset(cfg, split)
        inputs = self._dataset[position]['inputs']
        picture = np.ascontiguousarray(inputs.numpy().transpose(1, 2, 0)).astype(np.uint8)
        own = self.cfg.model.get('data_preprocessor') or self.cfg.get('data_preprocessor') or {}
        turned = own.get('bgr_to_rgb') or own.get('to_rgb')  # by the model
        return picture[:, :, ::-1] if turned else picture


def show(axes: Any, picture: np.ndarray, title: str) -> None:
    """A picture without axes, some text above it."""
    axes.imshow(picture)
    axes.set_title(title, fontsize=7, pad=2)
    axes.set_axis_off()


def spread_out(numbers: Sequence[int], count: int) -> list[int]:
    """That many of them, evenly spaced, first and last among them."""
    places = np.linspace(0, len(numbers) - 1, min(count, len(numbers))).round().astype(int)
    return [int(numbers[place]) for place in places]
