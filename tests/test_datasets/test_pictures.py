# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Pictures without what is known about them."""

import shutil

import numpy as np
import pytest
from mmengine.utils import import_modules_from_strings
from PIL import Image

from fgc_mm.datasets import Pictures
from fgc_mm.errors import DataError, UsageError


def write(path, count, start=0):
    path.mkdir(parents=True, exist_ok=True)
    for number in range(start, start + count):
        array = np.full((4, 4, 3), number, np.uint8)
        Image.fromarray(array).save(path / f'{number:03}.png')


def paths(dataset):
    return [item['img_path'] for item in (dataset.get_data_info(n) for n in range(len(dataset)))]


def test_a_folder_and_what_is_below(tmp_path):
    write(tmp_path, 12)
    write(tmp_path / 'a/b', 18, start=12)
    (tmp_path / 'notes.txt').write_text('none')
    found = paths(Pictures(folder=str(tmp_path)))
    assert len(found) == 30 and found == sorted(found)
    parts = [paths(Pictures(folder=str(tmp_path), part=part)) for part in ('train', 'held_back')]
    assert len(parts[1]) == 3 and sorted(parts[0] + parts[1]) == found
    assert parts[1] == paths(Pictures(folder=str(tmp_path), part='held_back'))


def test_those_of_a_config_without_annotations(demo_root, tmp_path):
    import_modules_from_strings('mmdet.datasets')
    root = tmp_path / 'tree'
    shutil.copytree(demo_root / 'detection/VOCdevkit/digits', root / 'digits')
    shutil.rmtree(root / 'digits/Annotations')
    voc = dict(
        type='VOCDataset',
        data_root=f'{root}/',
        ann_file='digits/ImageSets/Main/trainval.txt',
        data_prefix=dict(sub_data_root='digits/'),
        filter_cfg=dict(filter_empty_gt=True, min_size=8),
        pipeline=[dict(type='LoadAnnotations')],
        indices=7,
    )
    wrapped = dict(type='RepeatDataset', times=3, dataset=voc)
    dataset = Pictures(source=wrapped, scope='mmdet')
    assert len(dataset) == 7 and set(dataset.get_data_info(0)) == {'img_path', 'sample_idx'}


def test_pictures_that_are_no_files(cifar_root):
    source = dict(type='CIFARBinary', data_root=str(cifar_root), indices=6)
    dataset = Pictures(source=source)
    assert len(dataset) == 6 and set(dataset.get_data_info(3)) == {'img', 'sample_idx'}


@pytest.fixture
def cifar_root(tmp_path):
    records = np.random.default_rng(0).integers(0, 255, (8, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    records.tofile(tmp_path / 'data_batch_1.bin')
    return tmp_path


def test_what_cannot_be(tmp_path):
    write(tmp_path / 'one', 1)
    write(tmp_path / 'broken', 3)
    (tmp_path / 'broken/001.png').write_bytes(b'none')
    (tmp_path / 'empty').mkdir()
    for options, error, message in (
        (dict(), UsageError, 'give one of folder=None and source=None'),
        (dict(folder='x', part='some'), UsageError, "part='some' must be"),
        (dict(folder=str(tmp_path / 'none')), DataError, 'is no folder of pictures'),
        (dict(folder=str(tmp_path / 'empty')), DataError, 'has no pictures'),
        (dict(folder=str(tmp_path / 'one')), DataError, 'has 1 pictures; at least 2'),
        (dict(folder=str(tmp_path / 'broken')), DataError, '001.png cannot be read'),
    ):
        with pytest.raises(error, match=message):
            Pictures(**options)
