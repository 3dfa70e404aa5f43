# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The handwritten digits of scikit-learn: loading, splitting, drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np

from ...errors import MissingPackageError

SEED = 2007
VAL_PER_CLASS = 36
_NAMES = 'zero one two three four five six seven eight nine'
DIGIT_CLASSES = tuple(_NAMES.split())


@dataclass(frozen=True)
class Digits:
    """All handwritten digits and which of them belong to which split."""

    images: np.ndarray  # N x 8 x 8, float32, 0 is paper and 1 is ink
    labels: np.ndarray
    splits: dict[str, np.ndarray]  # indices of 'train' and 'val'


@lru_cache(maxsize=1)
def load_digits() -> Digits:
    """Load the 1,797 digits and split them, the same way every time.

    Every class gives the same number of digits to ``val`` and the rest to
    ``train``. The data names no writers, so one writer may be in both.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingPackageError(
            'the demo data is made of the digits inside scikit-learn, which is not installed; '
            'run "pip install scikit-learn", or install fgc-mm with its extra [demo]'
        ) from error
    bunch = datasets.load_digits()
    images = (bunch.images / bunch.images.max(axis=(1, 2), keepdims=True)).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    rng = np.random.default_rng(SEED)
    val = [
        rng.permutation(np.flatnonzero(labels == label))[:VAL_PER_CLASS]
        for label in range(len(DIGIT_CLASSES))
    ]
    val_indices = np.sort(np.concatenate(val))
    train_indices = np.setdiff1d(np.arange(len(labels)), val_indices)
    return Digits(images, labels, {'train': train_indices, 'val': val_indices})


def shuffled(indices: Sequence[int] | np.ndarray, rng: np.random.Generator) -> Iterator[int]:
    """Endless stream of digits: all of them in random order, again and again."""
    while True:
        yield from (int(index) for index in rng.permutation(indices))


def draw_digit(
    image: np.ndarray, size: float, rng: np.random.Generator, max_angle: float = 10.0
) -> np.ndarray:
    """Draw one digit large, as smooth ink with a soft edge."""
    angle = np.deg2rad(rng.uniform(-max_angle, max_angle))
    slant = rng.uniform(-0.12, 0.12)
    width = rng.uniform(0.9, 1.1)
    scale = size / 8
    patch = int(np.ceil(size * 1.5))
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    linear = scale * rotation @ np.array([[width, slant], [0.0, 1.0]])
    shift = (patch - 1) / 2 - linear @ np.array([3.5, 3.5])
    warped = cv2.warpAffine(
        image,
        np.column_stack([linear, shift]),
        (patch, patch),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_CONSTANT,
    )
    # Unsharp masking opens the loops that eight pixels have nearly closed; then the
    # edge, as wide as a source pixel, is steepened to about two pixels of the drawing.
    # Within the stroke some of the gray remains, as the pressure of the pen.
    smooth = cv2.GaussianBlur(warped, (0, 0), 0.35 * scale)
    sharp = smooth + 3.0 * (smooth - cv2.GaussianBlur(smooth, (0, 0), 1.2 * scale))
    stroke = np.clip(0.5 + max(0.8, 0.4 * scale) * (sharp - 0.65), 0.0, 1.0)
    return (stroke * np.clip(0.6 + 0.45 * smooth, 0.0, 1.0)).astype(np.float32)
