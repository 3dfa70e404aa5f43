# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How checkpoints, annotations, label maps and pictures get damaged; named in bad_input.txt."""

from __future__ import annotations

import io
import itertools
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch
from bad_input import Place
from PIL import Image

Damage = Callable[[Place], object]


def a_folder(place: Place, name: str) -> None:
    (place.path / name).mkdir()


# -- checkpoints: x.pth ---------------------------------------------------------------------------


def a_zip(place: Place) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, 'w') as archive:
        archive.writestr('a.txt', 'hello')
    (place.path / 'x.pth').write_bytes(content.getvalue())


def cut_checkpoint(place: Place) -> None:
    content = (place.data / 'gated.pth').read_bytes()
    (place.path / 'x.pth').write_bytes(content[: len(content) // 2])


def _saved(what: object) -> Damage:
    return lambda place: torch.save(what, place.path / 'x.pth')


saved_list = _saved([1, 2])
saved_number = _saved(3)
saved_empty = _saved(dict(meta={}, state_dict={}))


# -- detection: the second annotation, and the list -----------------------------------------------


def _xml(change: Callable[[str], str]) -> Damage:
    def damage(place: Place) -> None:
        path = sorted((place.tree('voc') / 'digits' / 'Annotations').glob('*.xml'))[1]
        before = path.read_text()
        after = change(before)
        assert after != before
        path.write_text(after)

    return damage


def _box(**sides: str) -> Damage:
    """The first box with other numbers."""

    def change(content: str) -> str:
        for side, value in sides.items():
            content = re.sub(f'(<{side}>).*?(</{side}>)', rf'\g<1>{value}\g<2>', content, count=1)
        return content

    return _xml(change)


xml_cut = _xml(lambda text: text[: len(text) // 2])
xml_empty = _xml(lambda text: '')
xml_text = _xml(lambda text: 'hello')
xml_binary = _xml(lambda text: '\x00\x01\x02')
xml_no_box = _xml(lambda text: text.replace('bndbox>', 'bindbox>'))
xml_no_side = _xml(lambda text: text.replace('ymax', 'ymxa'))
xml_word = _box(xmin='left')
xml_nan = _box(xmin='nan')
xml_inf = _box(xmax='1e999')
xml_huge = _box(xmax='1e30')
xml_no_name = _xml(lambda text: text.replace('name>', 'nmae>'))
xml_size = _xml(lambda text: text.replace('<width>128', '<width>wide'))
xml_no_width = _xml(lambda text: text.replace('width', 'breadth'))
xml_difficult = _xml(lambda text: text.replace('<difficult>0', '<difficult>maybe', 1))
box_turned = _box(xmin='90', xmax='20')
box_empty = _box(xmin='20', xmax='20')
box_outside = _box(xmin='400', xmax='420')
box_negative = _box(ymin='-40', ymax='-20')


def _unfolding(_: str) -> str:
    """Entities that would become 10^10 letters."""
    entities = ['<!ENTITY a0 "lollollol!">']
    for inner, outer in itertools.pairwise(f'a{n}' for n in range(10)):
        entities.append(f'<!ENTITY {outer} "{f"&{inner};" * 10}">')
    return f'<!DOCTYPE x [{"".join(entities)}]><annotation>&a9;</annotation>'


xml_bomb = _xml(_unfolding)


def other_classes(place: Place) -> None:
    for path in (place.tree('voc') / 'digits' / 'Annotations').glob('*.xml'):
        path.write_text(re.sub('<name>.*?</name>', '<name>cow</name>', path.read_text()))


def _list(content: bytes) -> Damage:
    def damage(place: Place) -> None:
        lists = place.tree('voc') / 'digits' / 'ImageSets' / 'Main'
        (lists / 'trainval.txt').write_bytes(content)

    return damage


empty_list = _list(b'')
binary_list = _list(b'\xff\xfe\x00')
blank_list = _list(b'000001\n\n000002\n')
other_list = _list(b'000001\n999999\n')


def no_list(place: Place) -> None:
    (place.tree('voc') / 'digits' / 'ImageSets' / 'Main' / 'trainval.txt').unlink()


def cut_jpegs(place: Place) -> None:
    for path in (place.tree('voc') / 'digits' / 'JPEGImages').iterdir():
        path.write_bytes(path.read_bytes()[:300])


# -- segmentation: the first label map ------------------------------------------------------------


def _labels(place: Place, split: str = 'train') -> list[Path]:
    return sorted((place.tree('seg') / 'gtFine' / split).rglob('*.png'))


def _mask(change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    def damage(place: Place) -> None:
        path = _labels(place)[0]
        cv2.imwrite(str(path), change(cv2.imread(str(path), cv2.IMREAD_UNCHANGED)))

    return damage


def _with(value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(labels: np.ndarray) -> np.ndarray:
        labels[5, 5] = value
        return labels

    return change


small_mask = _mask(lambda labels: labels[:100, :90])
line_mask = _mask(lambda labels: labels[:1])
value_mask = _mask(_with(77))
deep_mask = _mask(lambda labels: np.full(labels.shape, 300, np.uint16))
color_mask = _mask(lambda labels: np.stack([labels] * 3, axis=2))
alpha_mask = _mask(lambda labels: np.stack([labels] * 4, axis=2))


def empty_mask(place: Place) -> None:
    _labels(place)[0].write_bytes(b'')


def cut_mask(place: Place) -> None:
    _labels(place)[0].write_bytes(_labels(place)[0].read_bytes()[:80])


def text_mask(place: Place) -> None:
    _labels(place)[0].write_text('hello')


def no_mask(place: Place) -> None:
    _labels(place)[0].unlink()


def value_masks_val(place: Place) -> None:
    for path in _labels(place, 'val'):
        cv2.imwrite(str(path), _with(200)(cv2.imread(str(path), cv2.IMREAD_UNCHANGED)))


def no_masks(place: Place) -> None:
    shutil.rmtree(place.tree('seg') / 'gtFine')


def no_scenes(place: Place) -> None:
    shutil.rmtree(place.tree('seg') / 'leftImg8bit' / 'train')


# -- pictures of classes, CIFAR -------------------------------------------------------------------


def _picture(place: Place) -> Path:
    return sorted((place.tree('few') / 'train').rglob('*.png'))[0]


def text_picture(place: Place) -> None:
    _picture(place).write_text('hello')


def float_picture(place: Place) -> None:
    Image.new('F', (32, 32)).save(_picture(place), format='TIFF')


def no_train(place: Place) -> None:
    shutil.rmtree(place.tree('few') / 'train')


def no_folders(place: Place) -> None:
    for folder in (place.tree('few') / 'train').iterdir():
        shutil.rmtree(folder)


def third_class(place: Place) -> None:
    shutil.copytree(place.tree('few') / 'train' / '0', place.tree('few') / 'train' / '2')


def list_without_classes(place: Place) -> None:
    (place.tree('few') / 'train.txt').write_text('0/x.png\n')


def list_with_names(place: Place) -> None:
    (place.tree('few') / 'train.txt').write_text('0/x.png cow\n')


def _cifar(content: bytes) -> Damage:
    return lambda place: (place.tree('cifar') / 'data_batch_1.bin').write_bytes(content)


cifar_length = _cifar(b'\x01' * 5000)
cifar_empty = _cifar(b'')
cifar_label = _cifar(b'\xc8' * 3073)


def cifar_missing(place: Place) -> None:
    (place.tree('cifar') / 'data_batch_1.bin').unlink()
