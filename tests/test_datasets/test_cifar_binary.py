# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pickle
from pathlib import Path

import numpy as np
import pytest
from mmengine.registry import DATASETS, init_default_scope

from fgc_mm.datasets import CIFARBinary
from fgc_mm.errors import DataError


def write(path: Path, labels: list[tuple[int, ...]], images: np.ndarray) -> None:
    """The format by hand: label bytes, then 1024 red, 1024 green, 1024 blue bytes, row by row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'wb') as file:
        for label, image in zip(labels, images, strict=True):
            file.write(bytes(label))
            for channel in range(3):
                for row in range(32):
                    file.write(bytes(image[row, column, channel] for column in range(32)))


def pictures(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), np.uint8)


def test_reads_cifar10_batches_in_order(tmp_path):
    first, second, tenth = pictures(2, 1), pictures(1, 2), pictures(1, 3)
    write(tmp_path / 'data_batch_10.bin', [(9,)], tenth)
    write(tmp_path / 'data_batch_2.bin', [(3,)], second)
    write(tmp_path / 'data_batch_1.bin', [(0,), (7,)], first)
    write(tmp_path / 'data_batch_1 (copy).bin', [(1,), (1,)], first)
    write(tmp_path / 'test_batch.bin', [(5,)], pictures(1, 4))
    dataset = CIFARBinary(str(tmp_path))
    assert [dataset[i]['gt_label'] for i in range(len(dataset))] == [0, 7, 3, 9]
    expected = np.concatenate([first, second, tenth])
    for index in range(4):
        image = dataset[index]['img']
        assert image.dtype == np.uint8 and image.shape == (32, 32, 3)
        np.testing.assert_array_equal(image, expected[index])
    assert dataset.get_cat_ids(1) == [7]
    assert dataset.metainfo['classes'][5] == 'dog'
    test = CIFARBinary(str(tmp_path), split='test')
    assert [item['gt_label'] for item in test] == [5]


def test_reads_cifar100_fine_labels_from_the_unpacked_folder(tmp_path):
    images = pictures(2)
    write(tmp_path / 'cifar-100-binary' / 'train.bin', [(11, 98), (4, 0)], images)
    dataset = CIFARBinary(str(tmp_path), variant='cifar100')
    assert [item['gt_label'] for item in dataset] == [98, 0]
    np.testing.assert_array_equal(dataset[0]['img'], images[0])
    assert dataset.metainfo['classes'][98] == 'woman'
    assert len(dataset.metainfo['classes']) == 100


def test_items_are_those_of_mmpretrain(tmp_path, monkeypatch):
    """The same pictures as pickles for mmpretrain's CIFAR10 and as binary files for ours."""
    from mmpretrain.datasets import CIFAR10, CIFAR100

    monkeypatch.setattr(CIFAR10, 'train_list', [['data_batch_1', None]])
    monkeypatch.setattr(CIFAR10, 'test_list', [])
    images, labels = pictures(5), [3, 1, 4, 1, 5]
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    data = images.transpose(0, 3, 1, 2).reshape(5, 3072)
    (folder / 'data_batch_1').write_bytes(pickle.dumps({'data': data, 'labels': labels}))
    write(tmp_path / 'cifar-10-batches-bin' / 'data_batch_1.bin', [(n,) for n in labels], images)
    theirs = CIFAR10(data_root=str(tmp_path), download=False)
    ours = CIFARBinary(data_root=str(tmp_path))
    assert len(ours) == len(theirs)
    for mine, their in zip(ours, theirs, strict=True):
        assert mine.keys() == their.keys()
        assert mine['gt_label'] == their['gt_label'] and mine['sample_idx'] == their['sample_idx']
        np.testing.assert_array_equal(mine['img'], their['img'])
    assert tuple(ours.metainfo['classes']) == tuple(theirs.metainfo['classes'])
    hundred = CIFARBinary(str(tmp_path), variant='cifar100', lazy_init=True)
    assert tuple(hundred.metainfo['classes']) == tuple(CIFAR100.METAINFO['classes'])


def test_mmpretrain_pipeline_follows(tmp_path):
    from mmpretrain.utils import register_all_modules

    register_all_modules()
    init_default_scope('mmpretrain')
    images = pictures(1)
    write(tmp_path / 'data_batch_1.bin', [(6,)], images)
    dataset = DATASETS.build(
        dict(
            type='CIFARBinary',
            data_root=str(tmp_path),
            pipeline=[
                dict(type='RandomCrop', crop_size=32, padding=4),
                dict(type='RandomFlip', prob=1.0, direction='horizontal'),
                dict(type='PackInputs'),
            ],
        )
    )
    item = dataset[0]
    assert item['inputs'].shape == (3, 32, 32)
    assert item['data_samples'].gt_label.item() == 6
    assert item['data_samples'].sample_idx == 0


def test_missing_folder_says_where_to_put_what(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        CIFARBinary(str(tmp_path / 'nowhere'))
    for part in ('nowhere', 'data_batch_*.bin', 'cifar-10-batches-bin', 'binary version'):
        assert part in str(caught.value)
    write(tmp_path / 'data_batch_1.bin', [(1,)], pictures(1))
    with pytest.raises(FileNotFoundError, match=r'has no test_batch\.bin'):
        CIFARBinary(str(tmp_path), split='test')


@pytest.mark.parametrize('size', [0, 3072, 2 * 3073 - 1])
def test_truncated_file_is_named_with_sizes(tmp_path, size):
    (tmp_path / 'data_batch_1.bin').write_bytes(bytes(size))
    with pytest.raises(DataError) as caught:
        CIFARBinary(str(tmp_path))
    message = str(caught.value)
    assert f'data_batch_1.bin has {size} bytes' in message and '30730000' in message


def test_wrong_variant_and_foreign_labels_are_refused(tmp_path):
    write(tmp_path / 'test_batch.bin', [(2,), (10,)], pictures(2))
    with pytest.raises(DataError, match='label 10 in picture 1, but cifar10 has 10 classes'):
        CIFARBinary(str(tmp_path), split='test')
    with pytest.raises(ValueError, match="split='val' must be train or test"):
        CIFARBinary(str(tmp_path), split='val')
    with pytest.raises(ValueError, match="variant='cifar' must be cifar10 or cifar100"):
        CIFARBinary(str(tmp_path), variant='cifar')
