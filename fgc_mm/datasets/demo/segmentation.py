# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Scenes of digits in the tree of Cityscapes."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from .digits import DIGIT_CLASSES, SEED, load_digits, shuffled
from .scene import Scene, SceneStyle, draw_scene, write_image

# Half of the digits: telling all ten apart pixel by pixel takes longer than a demo should.
SEG_CLASSES = ('background', *DIGIT_CLASSES[:5])
SEG_PALETTE = (
    (0, 0, 0),
    (230, 25, 75),
    (60, 180, 75),
    (255, 225, 25),
    (0, 130, 200),
    (245, 130, 48),
)
IGNORED = 255
STYLE = SceneStyle(size=128, digit_size=(30.0, 46.0), contrast=(60.0, 130.0), cut=0.1, margin=3)
DIGITS_PER_SCENE = (4, 7)
# Scenes of every "city"; the cities of the two splits differ, as in Cityscapes.
CITIES = {'train': {'kreisdorf': 150, 'linienburg': 150}, 'val': {'punktheim': 60}}


def label_map(scene: Scene) -> np.ndarray:
    """Train ids of a scene: 0 is background, digit d is d + 1.

    The soft edge, one pixel on either side of the ink's outline, is ignored.
    """
    labels = np.zeros(scene.image.shape[:2], np.uint8)
    neighbors = np.ones((3, 3), np.uint8)
    for digit in scene.digits:
        ink = (digit.ink >= 0.5).astype(np.uint8)
        labels[cv2.dilate(ink, neighbors) > 0] = IGNORED
        labels[cv2.erode(ink, neighbors) > 0] = digit.label + 1
    return labels


def build_segmentation(root: Path) -> dict[str, dict[str, list[int]]]:
    """Write ``leftImg8bit`` and ``gtFine``."""
    sources: dict[str, dict[str, list[int]]] = {}
    for part, (split, cities) in enumerate(CITIES.items()):
        sources[split] = {}
        digits = load_digits()
        used = digits.splits[split][digits.labels[digits.splits[split]] < len(SEG_CLASSES) - 1]
        stream = shuffled(used, np.random.default_rng([SEED, 3, part]))
        names = [f'{city}/{city}_{n:06d}_000019' for city in cities for n in range(cities[city])]
        for number, name in enumerate(names):
            rng = np.random.default_rng([SEED, 3, part, number])
            count = int(rng.integers(*DIGITS_PER_SCENE, endpoint=True))
            scene = draw_scene(rng, stream, count, STYLE)
            write_image(root / 'leftImg8bit' / split / f'{name}_leftImg8bit.png', scene.image)
            labels = root / 'gtFine' / split / f'{name}_gtFine_labelTrainIds.png'
            write_image(labels, label_map(scene))
            sources[split][name] = [digit.index for digit in scene.digits]
    return sources
