# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Broken pictures are named, whoever reads them."""

import pickle
import re

import cv2
import numpy as np
import pytest
from mmengine.dataset import BaseDataset, ConcatDataset
from mmengine.registry import TRANSFORMS
from torch.utils.data import DataLoader

from fgc_mm.datasets import name_broken_pictures, picture_fault
from fgc_mm.errors import DataError


@pytest.fixture
def jpeg(tmp_path):
    path = tmp_path / 'picture.jpg'
    noise = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    cv2.imwrite(str(path), noise)
    return path


def break_file(path, how):
    content = path.read_bytes()
    if how == 'missing':
        path.unlink()
    else:
        path.write_bytes({'empty': b'', 'cut': content[: len(content) // 2], 'text': b'hello'}[how])


FAULTS = {
    'missing': 'does not exist',
    'empty': r'is empty \(0 bytes\)',
    'cut': 'cannot be decoded',
    'text': r'\(5 bytes\) cannot be decoded',
}


@pytest.mark.parametrize('how', FAULTS)
def test_what_is_wrong_with_a_picture(how, jpeg):
    assert picture_fault(str(jpeg)) is None
    break_file(jpeg, how)
    fault = picture_fault(str(jpeg))
    assert re.search(f'{jpeg}.*{FAULTS[how]}', fault)


class Pictures(BaseDataset):
    def load_data_list(self):
        return [dict(img_path=str(path)) for path in sorted(self.paths)]

    def __init__(self, paths, pipeline):
        self.paths = paths
        super().__init__(pipeline=pipeline, serialize_data=False)


def load(results):
    from mmcv.transforms import LoadImageFromFile

    return LoadImageFromFile()(results)


def fail(results):
    raise KeyError('not about the picture')


def only_size(results):
    return results['img'].shape[0]


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('how', ['empty', 'cut'])
def test_a_dataset_names_the_file(how, workers, jpeg):
    inner = Pictures([jpeg], [load, only_size])
    dataset = ConcatDataset([inner, Pictures([jpeg], [load, only_size])])
    name_broken_pictures(dataset)
    loader = DataLoader(dataset, batch_size=2, num_workers=workers)
    assert next(iter(loader)).tolist() == [40, 40]
    break_file(jpeg, how)
    with pytest.raises(DataError, match=f'{jpeg}.*{FAULTS[how]}'):
        next(iter(loader))


def test_other_errors_and_attributes_pass_through(jpeg):
    dataset = Pictures([jpeg], [load, fail])
    name_broken_pictures(dataset)
    name_broken_pictures(dataset)  # a second time changes nothing
    with pytest.raises(KeyError, match='not about the picture'):
        dataset[0]
    assert dataset.pipeline.transforms == [load, fail]
    again = pickle.loads(pickle.dumps(dataset.pipeline))
    assert again.transforms == [load, fail]


def test_a_label_map_is_named_too(jpeg, tmp_path):
    pytest.importorskip('mmseg.utils').register_all_modules(init_default_scope=False)
    label = tmp_path / 'label.png'
    cv2.imwrite(str(label), np.zeros((40, 60), np.uint8))
    pipeline = TRANSFORMS.build(dict(type='mmseg.LoadAnnotations'))

    class Labeled(Pictures):
        def load_data_list(self):
            return [
                dict(
                    img_path=str(jpeg),
                    seg_map_path=str(label),
                    seg_fields=[],
                    label_map=None,
                    reduce_zero_label=False,
                )
            ]

    dataset = Labeled([jpeg], [load, pipeline])
    name_broken_pictures(dataset)
    assert dataset[0]['gt_seg_map'].shape == (40, 60)
    break_file(label, 'cut')
    with pytest.raises(DataError, match=str(label)):
        dataset[0]
