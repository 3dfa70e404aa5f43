# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Scenes of digits in the tree of PASCAL VOC 2007."""

from __future__ import annotations

import contextlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from .digits import DIGIT_CLASSES, SEED, load_digits, shuffled
from .scene import DrawnDigit, Scene, SceneStyle, draw_scene, write_image

STYLE = SceneStyle(
    size=128, digit_size=(20.0, 56.0), contrast=(60.0, 130.0), faint=0.05, cut=0.1, margin=2
)
DIGITS_PER_SCENE = (2, 6)
SCENES = {'train': 400, 'val': 100}
# VOC's names of the two sets.
IMAGE_SETS = {'train': 'trainval', 'val': 'test'}


def is_truncated(digit: DrawnDigit) -> bool:
    """Whether the border of the picture cuts ink off."""
    return digit.visible < 0.99


def is_difficult(digit: DrawnDigit) -> bool:
    """Whether hardly any contrast or too little of the digit is left to recognize it."""
    return digit.contrast < 32 or digit.visible < 0.6


def draw_detection_scenes(split: str) -> list[Scene]:
    """All scenes of a split, in the order of their numbers."""
    part = list(SCENES).index(split)
    stream = shuffled(load_digits().splits[split], np.random.default_rng([SEED, 2, part]))
    scenes = []
    for number in range(SCENES[split]):
        rng = np.random.default_rng([SEED, 2, part, number])
        count = int(rng.integers(*DIGITS_PER_SCENE, endpoint=True))
        scenes.append(draw_scene(rng, stream, count, STYLE))
    return scenes


def build_detection(root: Path) -> dict[str, dict[str, list[int]]]:
    """Write ``VOCdevkit/VOC2007``."""
    voc = root / 'VOCdevkit' / 'VOC2007'
    for folder in ('Annotations', 'ImageSets/Main', 'JPEGImages'):
        (voc / folder).mkdir(parents=True)
    # mmdet takes whatever lies under a folder named VOC2007 for VOC's twenty classes when it
    # prints a table: the same folder under another name.
    with contextlib.suppress(OSError):
        (root / 'VOCdevkit' / 'digits').symlink_to('VOC2007', target_is_directory=True)
    sources: dict[str, dict[str, list[int]]] = {}
    number = 0
    for split in SCENES:
        sources[split] = {}
        for scene in draw_detection_scenes(split):
            number += 1
            name = f'{number:06d}'
            write_image(voc / 'JPEGImages' / f'{name}.jpg', scene.image)
            xml = ElementTree.tostring(_annotation(name, scene), encoding='unicode')
            (voc / 'Annotations' / f'{name}.xml').write_text(xml + '\n', 'utf-8', newline='\n')
            sources[split][name] = [digit.index for digit in scene.digits]
        names = ''.join(f'{name}\n' for name in sources[split])
        (voc / 'ImageSets' / 'Main' / f'{IMAGE_SETS[split]}.txt').write_text(names, newline='\n')
    return sources


def _annotation(name: str, scene: Scene) -> ElementTree.Element:
    height, width, depth = scene.image.shape
    root = ElementTree.Element('annotation')
    _add(root, folder='VOC2007', filename=f'{name}.jpg')
    source = ElementTree.SubElement(root, 'source')
    _add(source, database='fgc_mm demo', annotation='fgc_mm demo', image='scikit-learn digits')
    _add(ElementTree.SubElement(root, 'size'), width=width, height=height, depth=depth)
    _add(root, segmented=0)
    for digit in scene.digits:
        item = ElementTree.SubElement(root, 'object')
        _add(
            item,
            name=DIGIT_CLASSES[digit.label],
            pose='Unspecified',
            truncated=int(is_truncated(digit)),
            difficult=int(is_difficult(digit)),
        )
        # VOC counts pixels from one.
        x1, y1, x2, y2 = (value + 1 for value in digit.box)
        _add(ElementTree.SubElement(item, 'bndbox'), xmin=x1, ymin=y1, xmax=x2, ymax=y2)
    ElementTree.indent(root, '\t')
    return root


def _add(parent: ElementTree.Element, **values: object) -> None:
    for tag, value in values.items():
        ElementTree.SubElement(parent, tag).text = str(value)
