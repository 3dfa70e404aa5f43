# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""From a config and a checkpoint to an exported network."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Optional

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import DATASETS
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from ..datasets import check_dataset_paths, picture_fault
from ..errors import DataError, UsageError
from ..evaluation.pictures import find_pictures
from ..runtime import unwrap
from .export import Exported, Picture, export
from .export_formats import FORMATS
from .export_int8 import check_int8
from .export_parts import find_part
from .slim_files import load_fitting


def export_checkpoint(
    cfg: Config,
    runner: Runner,
    checkpoint: str,
    images: Optional[Sequence[str]] = None,
    count: int = 4,
    metadata: Optional[dict[str, Any]] = None,
    int8: int = 0,
    calibrate: Optional[Sequence[str]] = None,
    **options: Any,
) -> Exported:
    """Export a checkpoint, checked on pictures of the test set.

    Args:
        cfg (Config): The config.
        runner (Runner): Built from it; its model is loaded here.
        checkpoint (str): File of the weights.
        images (Sequence[str], optional): Pictures, or folders of them, in place
            of the test set's. Defaults to None.
        count (int): How many pictures to check with. Defaults to 4.
        metadata (dict, optional): More for the file. Defaults to None.
        int8 (int): Quantize to int8 with so many pictures. Defaults to 0, float32.
        calibrate (Sequence[str], optional): These pictures, or folders of them, in place of the
            training set's. Defaults to None.
        options: See :func:`export`.

    Returns:
        Exported: The network.

    Raises:
        UsageError: If there is nothing to export or to check with, the
            checkpoint does not fit, or the check fails.
        FileNotFoundError: If a picture does not exist.
        MissingPackageError: If a package is missing.
    """
    # Before the long part:
    file_format, opset = options.get('file_format', 'onnx'), options.get('opset', 17)
    FORMATS[file_format](opset)
    if int8:
        check_int8(file_format, opset)
        _check_held_back(images or (), calibrate or ())
    model = unwrap(runner.model).cpu().eval()
    find_part(model, options.get('part', 'model'))
    loaded = load_fitting(model, checkpoint)
    known = dict((loaded.get('meta') or {}).get('dataset_meta') or {})
    if images:
        batches = _batches_of(_named(images), cfg)
    else:
        loader = _test_loader(cfg, runner)
        known = {**getattr(loader.dataset, 'metainfo', {}), **known}
        batches = iter(loader)
    pictures = [_picture(model, batch) for batch in islice(batches, count)]
    if not pictures:
        raise UsageError('the test set, test_dataloader, has no images to check with')
    if int8:
        infos = _named(calibrate)[:int8] if calibrate else _of_training(cfg, int8)
        options['calibration'] = [_picture(model, batch) for batch in _batches_of(infos, cfg)]
    # mmpretrain's datasets write upper case into a checkpoint
    classes = known.get('classes') or known.get('CLASSES')
    named = dict(classes=list(classes)) if classes else {}
    return export(model, pictures, metadata={**(metadata or {}), **named}, **options)


@torch.no_grad()
def _picture(model: nn.Module, batch: dict) -> Picture:
    inputs = batch['inputs']
    raw = inputs if isinstance(inputs, torch.Tensor) else torch.stack(list(inputs))
    data = model.data_preprocessor(copy.deepcopy(batch), False)  # type: ignore[operator]
    return Picture(raw, data['inputs'])


def _test_loader(cfg: Config, runner: Runner) -> DataLoader:
    """The test set, picture by picture."""
    if cfg.get('test_dataloader') is None:
        raise UsageError('the config has no test_dataloader to check with: give pictures (--image)')
    loader_cfg = copy.deepcopy(cfg.test_dataloader)
    loader_cfg.update(batch_size=1, num_workers=0, persistent_workers=False)
    loader_cfg.pop('batch_sampler', None)
    return runner.build_dataloader(loader_cfg)


def _named(images: Sequence[str]) -> list[dict]:
    """What a dataset would say of pictures that are named by path or folder."""
    paths = [path for image in images for path in find_pictures(image)]
    return [dict(img_path=path, img_id=0) for path in paths]


def _check_held_back(images: Sequence[str], calibrate: Sequence[str]) -> None:
    checked, ranges = (
        {os.path.realpath(info['img_path']) for info in _named(paths)}
        for paths in (images, calibrate)
    )
    if checked & ranges:
        raise UsageError(
            f'--calibrate and --image both name {min(checked & ranges)}: an int8 network is '
            'checked on pictures it was not calibrated on'
        )


def _of_training(cfg: Config, count: int) -> Iterator[dict]:
    """What the training set says of some of its pictures, from all over it."""
    if cfg.get('train_dataloader') is None:
        raise UsageError(
            'the config has no train_dataloader to calibrate an int8 network on: give pictures '
            '(--calibrate)'
        )
    check_dataset_paths(cfg, ('train',))
    dataset = DATASETS.build(copy.deepcopy(cfg.train_dataloader.dataset))
    for number in _spread(len(dataset), count):
        yield dataset.get_data_info(number)


def _spread(size: int, count: int) -> list[int]:
    """Some numbers from all over a range."""
    count = min(count, size)
    return [number * size // count for number in range(count)]


def _batches_of(infos: Iterable[dict], cfg: Config) -> Iterator[dict]:
    """Pictures through the test pipeline, which needs no annotations then."""
    dataset: Any = (cfg.get('test_dataloader') or {}).get('dataset') or {}
    while 'pipeline' not in dataset and ('dataset' in dataset or 'datasets' in dataset):
        dataset = dataset.get('dataset') or dataset['datasets'][0]
    steps = [step for step in dataset.get('pipeline') or [] if 'Annotations' not in step['type']]
    if not steps:
        raise UsageError('the config has no test_dataloader.dataset.pipeline to read pictures with')
    reads = 'LoadImage' in steps[0]['type']  # not those of datasets that hold arrays
    load, pipeline = Compose([dict(type='LoadImageFromFile')]), Compose(steps)
    for info in infos:
        try:
            loaded = info if reads or 'img' in info else load(info)
            yield pseudo_collate([pipeline(loaded)])
        except Exception as error:
            fault = picture_fault(info['img_path']) if 'img_path' in info else None
            if fault is None:
                raise
            raise DataError(fault) from error
