# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A few small pictures in the layout of every dataset, and configs cut down to them."""

import functools
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
import torch
from command_line import run_tool  # noqa: F401
from forget import forget_runs
from mmengine.config import Config
from mmengine.config import utils as config_utils

import fgc_mm  # noqa: F401

TRAIN, TEST = 4, 2
PX = 64


def make_voc(demo, root):
    """Scenes of the demo, twice as large, whose digits are called by names of VOC's classes."""
    names = ['aeroplane', 'bicycle', 'bird', 'boat', 'bottle', 'bus', 'car', 'cat', 'chair', 'cow']
    digits = ['zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine']
    source, target = demo / 'detection/VOCdevkit/VOC2007', root / 'VOC2007'
    for folder in ('Annotations', 'JPEGImages', 'ImageSets/Main'):
        (target / folder).mkdir(parents=True)
    for split, count in (('trainval', TRAIN), ('test', TEST)):
        listed = (source / f'ImageSets/Main/{split}.txt').read_text().split()[:count]
        (target / f'ImageSets/Main/{split}.txt').write_text('\n'.join(listed) + '\n')
        for name in listed:
            picture = cv2.imread(str(source / f'JPEGImages/{name}.jpg'))
            picture = cv2.resize(picture, None, fx=2, fy=2)
            cv2.imwrite(str(target / f'JPEGImages/{name}.jpg'), picture)
            tree = ElementTree.parse(source / f'Annotations/{name}.xml')
            for item in tree.iter('object'):
                item.find('name').text = names[digits.index(item.find('name').text)]
            for tag in ('xmin', 'ymin', 'xmax', 'ymax', 'width', 'height'):
                for number in tree.iter(tag):
                    number.text = str(2 * int(number.text))
            tree.write(target / f'Annotations/{name}.xml')


def make_coco(voc, root):
    """The same pictures as COCO files."""
    from mmdet.datasets import CocoDataset

    classes = CocoDataset.METAINFO['classes']
    known = [dict(id=number, name=name) for number, name in enumerate(classes, 1)]
    (root / 'annotations').mkdir(parents=True)
    for split, folder in (('trainval', 'train2017'), ('test', 'val2017')):
        (root / folder).mkdir()
        images, annotations = [], []
        for name in (voc / f'ImageSets/Main/{split}.txt').read_text().split():
            shutil.copy(voc / f'JPEGImages/{name}.jpg', root / folder)
            number, tree = len(images), ElementTree.parse(voc / f'Annotations/{name}.xml')
            size = {tag: int(next(tree.iter(tag)).text) for tag in ('width', 'height')}
            images.append(dict(id=number, file_name=f'{name}.jpg', **size))
            for item in tree.iter('object'):
                box = item.find('bndbox')
                x1, y1, x2, y2 = (
                    int(box.find(tag).text) for tag in ('xmin', 'ymin', 'xmax', 'ymax')
                )
                annotation = dict(image_id=number, category_id=1 + len(annotations) % 2, iscrowd=0)
                annotation.update(bbox=[x1, y1, x2 - x1, y2 - y1], area=(x2 - x1) * (y2 - y1))
                annotations.append(dict(id=len(annotations), **annotation))
        content = dict(images=images, annotations=annotations, categories=known)
        (root / f'annotations/instances_{folder}.json').write_text(json.dumps(content))


def make_imagenet(root):
    """1,000 folders for the classes, of which two have pictures."""
    rng = np.random.default_rng(0)
    for split, count in (('train', TRAIN), ('val', TEST)):
        for label in range(1000):
            (root / split / f'n{label:08}').mkdir(parents=True)
        for i in range(count):
            picture = rng.integers(0, 256, (48, 40, 3), dtype=np.uint8)
            cv2.imwrite(str(root / split / f'n{i % 2:08}' / f'{i}.JPEG'), picture)


def make_cifar(root, folder, files, label_bytes):
    rng = np.random.default_rng(0)
    (root / folder).mkdir(parents=True)
    for name, count in files.items():
        records = rng.integers(0, 256, (count, label_bytes + 3072), dtype=np.uint8)
        records[:, :label_bytes] %= 10
        records.tofile(root / folder / name)


@pytest.fixture(scope='session')
def data(request, tmp_path_factory):
    """``data(dataset)``: where the files of a dataset's config lie, made when first asked for."""
    made = {}

    def demo():
        return request.getfixturevalue('demo_root')

    def make(kind, root):
        if kind == 'VOCDataset':
            make_voc(demo(), root)
        elif kind == 'CocoDataset':
            make_coco(Path(data('VOCDataset')) / 'VOC2007', root)
        elif kind == 'ImageNet':
            make_imagenet(root)
        elif kind == 'cifar10':
            files = {'data_batch_1.bin': TRAIN, 'test_batch.bin': TEST}
            make_cifar(root, 'cifar-10-batches-bin', files, 1)
        else:
            make_cifar(root, 'cifar-100-binary', {'train.bin': TRAIN, 'test.bin': TEST}, 2)

    def data(kind):
        if kind == 'CityscapesDataset':  # the demo has its tree and its file names
            return f'{demo()}/segmentation/'
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            make(kind, made[kind])
        return f'{made[kind]}/'

    return lambda dataset: data(
        dataset.get('variant', 'cifar10') if dataset.type == 'CIFARBinary' else dataset.type
    )


@pytest.fixture(scope='session', autouse=True)
def read_metafiles_once():
    """mmengine reads all metafiles of a package for each base that is taken from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_utils, 'load', functools.cache(config_utils.load))
        yield


# Per transform: its options for small pictures.
SMALL = {
    'Resize': {'scale': (PX, PX)},
    'RandomResize': {'scale': (PX, PX)},
    'RandomResizedCrop': {'scale': 32},
    'ResizeEdge': {'scale': 36},
    'CenterCrop': {'crop_size': 32},
}


@pytest.fixture
def small_options(data):
    """``small_options(cfg, work_dir)``: a config cut down to a few small pictures."""
    return lambda cfg, work_dir: _small_options(cfg, data, work_dir)


def _small_options(cfg, data, work_dir):
    """What would stand behind ``--cfg-options`` for two training steps and a test pass."""
    options = {
        'work_dir': str(work_dir),
        'load_from': None,
        'model.backbone.init_cfg': None,
        'default_hooks.checkpoint': None,
        'default_hooks.logger.interval': 1,
        'val_cfg': None,
        'val_dataloader': None,
        'val_evaluator': None,
    }
    for split, count in (('train', TRAIN), ('test', TEST)):
        key, loader = f'{split}_dataloader', cfg[f'{split}_dataloader']
        root = data(loader.dataset)
        options[f'{key}.dataset.data_root'] = root
        options[f'{key}.dataset.indices'] = count
        options[f'{key}.batch_size'] = 2
        options[f'{key}.num_workers'] = 0
        options[f'{key}.persistent_workers'] = False
        for i, transform in enumerate(loader.dataset.pipeline):
            small = dict(SMALL.get(transform.type, {}))
            if transform.type == 'RandomCrop':
                small['crop_size'] = (PX, PX) if cfg.default_scope == 'mmseg' else 16
            for name, value in small.items():
                options[f'{key}.dataset.pipeline.{i}.{name}'] = value
        if loader.dataset.type == 'CocoDataset' and split == 'test':
            # No metric without detections, and untrained scores are near their prior, 0.01.
            options['model.test_cfg.score_thr'] = 0.0
            options['test_evaluator.ann_file'] = f'{root}annotations/instances_val2017.json'
    if 'max_iters' in cfg.train_cfg:
        options.update({'train_cfg.max_iters': 2, 'train_cfg.val_interval': 2})
    else:
        options['train_cfg.max_epochs'] = 1
    if cfg.default_scope == 'mmseg':
        options.update({'model.pretrained': None, 'model.data_preprocessor.size': (PX, PX)})
    if cfg.model.type == 'FasterRCNN':
        options['model.train_cfg.rcnn.sampler.num'] = 16
        options['model.train_cfg.rpn_proposal.max_per_img'] = 32
        options['model.test_cfg.rpn.max_per_img'] = 16
    for i, hook in enumerate(cfg.get('custom_hooks', [])):
        if hook.type == 'FGCHook':
            options[f'custom_hooks.{i}.k'] = 1
            options[f'custom_hooks.{i}.log_interval'] = 1
    return options


@pytest.fixture
def train_and_test(data, tmp_path, monkeypatch):
    """``train_and_test(config file)``: what can be seen after two steps and a test pass."""
    from fgc_mm.evaluation import summary as report
    from fgc_mm.runtime import launch

    # Formatted for the log and the work dir, which takes longer than the training.
    monkeypatch.setattr(Config, 'pretty_text', property(lambda self: ''))
    torch.set_num_threads(1)

    def run(config):
        cfg = Config.fromfile(config)
        cfg.merge_from_dict(_small_options(cfg, data, tmp_path))
        cfg.launcher = 'none'
        launch.prepare(cfg, splits=('train', 'test'))
        report.add_macs_hook(cfg)
        runner = launch.build_runner(cfg)
        runner.train()
        hub = runner.message_hub
        losses = {
            name.removeprefix('train/'): hub.get_scalar(name).current()
            for name in hub.log_scalars
            if name.startswith('train/') and 'loss' in name
        }
        return SimpleNamespace(
            cfg=cfg, runner=runner, iters=runner.iter, losses=losses, metrics=runner.test()
        )

    yield run
    logging.shutdown()
    forget_runs()


@pytest.fixture(scope='session')
def project():
    """The folder of the project."""
    return Path(__file__).parents[2]
