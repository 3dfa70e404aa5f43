# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The stock dataset classes of mmpretrain, mmdet and mmseg read the demo data."""

import json
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from sklearn import datasets as sklearn_datasets

from fgc_mm.datasets import DIGIT_CLASSES, SEG_CLASSES, SEG_PALETTE

TARGETS = sklearn_datasets.load_digits().target
CONFIGS = Path(__file__).parents[3] / 'configs' / '_base_'


@pytest.mark.parametrize(('split', 'count'), [('train', 2 * 1437), ('val', 360)])
def test_classification_in_mmpretrain(demo_root, split, count):
    from mmpretrain.datasets import CustomDataset
    from mmpretrain.utils import register_all_modules

    register_all_modules()
    pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
    dataset = CustomDataset(
        data_root=str(demo_root / 'classification'), data_prefix=split, pipeline=pipeline
    )
    assert len(dataset) == count
    assert list(dataset.CLASSES) == [str(digit) for digit in range(10)]
    for index in range(0, count, 40):
        item = dataset[index]
        assert item['inputs'].shape == (3, 32, 32)
        digit = int(Path(item['data_samples'].img_path).stem.split('_')[0])
        assert item['data_samples'].gt_label.item() == TARGETS[digit]


@pytest.mark.parametrize(
    ('split', 'image_set', 'count'), [('train', 'trainval', 400), ('val', 'test', 100)]
)
def test_detection_in_mmdet(demo_root, split, image_set, count):
    from mmdet.datasets import VOCDataset
    from mmdet.utils import register_all_modules

    register_all_modules()
    dataset = VOCDataset(
        data_root=str(demo_root / 'detection' / 'VOCdevkit'),
        ann_file=f'VOC2007/ImageSets/Main/{image_set}.txt',
        data_prefix=dict(sub_data_root='VOC2007/'),
        metainfo=dict(classes=DIGIT_CLASSES),
        test_mode=True,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True),
            dict(type='PackDetInputs', meta_keys=('img_id',)),
        ],
    )
    sources = json.loads((demo_root / 'detection' / 'digits.json').read_text())[split]
    assert len(dataset) == len(sources) == count
    assert dataset.metainfo['dataset_type'] == 'VOC2007'
    for index in range(count):
        instances = dataset.get_data_info(index)['instances']
        digits = sources[dataset.get_data_info(index)['img_id']]
        assert [i['bbox_label'] for i in instances] == TARGETS[digits].tolist()
        boxes = np.array([i['bbox'] for i in instances])
        assert 2 <= len(boxes) <= 6
        assert boxes.min() >= 0 and boxes.max() <= 127
        assert (boxes[:, 2:] - boxes[:, :2] >= 3).all()
    item = dataset[0]
    assert item['inputs'].shape == (3, 128, 128)
    sample = item['data_samples']
    total = len(sample.gt_instances) + len(sample.ignored_instances)
    assert total == len(sources[sample.img_id])


def test_voc_annotation_has_all_fields(demo_root):
    voc = demo_root / 'detection' / 'VOCdevkit' / 'VOC2007'
    ids = (voc / 'ImageSets/Main/trainval.txt').read_text().split()
    assert ids == [f'{n:06d}' for n in range(1, 401)]
    flags: dict[str, set] = {'truncated': set(), 'difficult': set()}
    for name in ids:
        root = ElementTree.parse(voc / 'Annotations' / f'{name}.xml').getroot()
        assert root.findtext('folder') == 'VOC2007'
        assert root.findtext('filename') == f'{name}.jpg'
        image = cv2.imread(str(voc / 'JPEGImages' / f'{name}.jpg'))
        size = tuple(int(root.findtext(f'size/{k}')) for k in ('height', 'width', 'depth'))
        assert size == image.shape == (128, 128, 3)
        for item in root.findall('object'):
            tags = [child.tag for child in item]
            assert tags == ['name', 'pose', 'truncated', 'difficult', 'bndbox']
            x1, y1, x2, y2 = (int(child.text) for child in item.find('bndbox'))
            assert 1 <= x1 < x2 <= 128 and 1 <= y1 < y2 <= 128
            for flag, seen in flags.items():
                seen.add(item.findtext(flag))
    assert flags == {'truncated': {'0', '1'}, 'difficult': {'0', '1'}}


@pytest.mark.parametrize(('split', 'count'), [('train', 300), ('val', 60)])
@pytest.mark.parametrize('reader', ['BaseSegDataset', 'CityscapesDataset'])
def test_segmentation_in_mmseg(demo_root, split, count, reader):
    import mmseg.datasets
    from mmseg.utils import register_all_modules

    register_all_modules()
    own = dict(
        img_suffix='_leftImg8bit.png',
        seg_map_suffix='_gtFine_labelTrainIds.png',
        metainfo=dict(classes=SEG_CLASSES, palette=[list(c) for c in SEG_PALETTE]),
    )
    dataset = getattr(mmseg.datasets, reader)(
        data_root=str(demo_root / 'segmentation'),
        data_prefix=dict(img_path=f'leftImg8bit/{split}', seg_map_path=f'gtFine/{split}'),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations'),
            dict(type='PackSegInputs'),
        ],
        **(own if reader == 'BaseSegDataset' else {}),
    )
    assert len(dataset) == count
    assert len(dataset.metainfo['classes']) == (6 if reader == 'BaseSegDataset' else 19)
    sources = json.loads((demo_root / 'segmentation' / 'digits.json').read_text())[split]
    for index in range(0, count, 10):
        item = dataset[index]
        assert item['inputs'].shape == (3, 128, 128)
        path = Path(item['data_samples'].img_path)
        digits = sources[f'{path.parent.name}/{path.name}'.removesuffix('_leftImg8bit.png')]
        labels = set(item['data_samples'].gt_sem_seg.data.unique().tolist())
        assert labels == {0, 255, *(TARGETS[digits] + 1)}


def test_segmentation_covers_all_classes_and_ignores_only_edges(demo_root):
    total = np.zeros(256, int)
    for path in (demo_root / 'segmentation' / 'gtFine').rglob('*.png'):
        labels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        assert labels.shape == (128, 128) and labels.dtype == np.uint8
        total += np.bincount(labels.ravel(), minlength=256)
        # Ink and paper never touch: an ignored pixel lies between them.
        paper = cv2.dilate((labels == 0).astype(np.uint8), np.ones((3, 3), np.uint8))
        ink = (labels > 0) & (labels != 255)
        assert not (paper.astype(bool) & ink).any()
    assert set(np.flatnonzero(total)) == {*range(len(SEG_CLASSES)), 255}
    share = total / total.sum()
    assert 0.6 < share[0] < 0.9
    assert share[1 : len(SEG_CLASSES)].min() > 0.005
    assert share[255] < 0.15


@pytest.mark.parametrize('kind', ['detection', 'segmentation'])
def test_demo_configs_name_the_same_classes(kind):
    metainfo = Config.fromfile(CONFIGS / f'digits_{kind}.py').train_dataloader.dataset.metainfo
    if kind == 'detection':
        assert tuple(metainfo.classes) == DIGIT_CLASSES
    else:
        assert tuple(metainfo.classes) == SEG_CLASSES
        assert [tuple(color) for color in metainfo.palette] == list(SEG_PALETTE)
