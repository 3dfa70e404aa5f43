# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Models as the configs of mmdet, mmseg and mmpretrain have them, made small; their training."""

import copy
import importlib
import uuid
from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from torch.utils.data import Dataset

GATE = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'), bias_init=0.5)


def stock(package, path):
    """The model of one of a package's own configs."""
    folder = Path(importlib.import_module(package).__file__).parent / '.mim/configs'
    return Config.fromfile(folder / path).model


def gated(model, **options):
    """A config of a model with its backbone gated and its heads small."""
    model = copy.deepcopy(model)
    backbone = {k: v for k, v in model['backbone'].items() if k != 'init_cfg'}
    model.pop('pretrained', None)
    model['backbone'] = dict(type='Gated', backbone=backbone, gate=GATE, **options)
    return model


def merged(model, **changes):
    """A config with changes; ``None`` takes a key out, a dict for a list changes all it holds."""
    model = copy.deepcopy(dict(model))
    for key, value in changes.items():
        old = model.get(key)
        if isinstance(old, (list, tuple)) and isinstance(value, dict):
            model[key] = [merged(part, **value) for part in old]
        elif isinstance(old, dict) and isinstance(value, dict) and not value.pop('_new', False):
            model[key] = merged(old, **value)
        elif value is None:
            model.pop(key, None)
        else:
            model[key] = value
    return ConfigDict(model)


def narrow_regions(model, channels=8):
    """Heads of two-stage detectors with few channels and proposals."""
    rpn = dict(nms_pre=20, max_per_img=8)
    head = dict(in_channels=channels, fc_out_channels=16, num_classes=2)
    roi = dict(bbox_roi_extractor=dict(out_channels=channels), bbox_head=head)
    if 'mask_head' in model['roi_head']:
        roi['mask_roi_extractor'] = dict(out_channels=channels)
        roi['mask_head'] = dict(
            in_channels=channels, conv_out_channels=4, num_classes=2, num_convs=1
        )
    return merged(
        model,
        rpn_head=dict(in_channels=channels, feat_channels=channels),
        roi_head=roi,
        train_cfg=dict(rpn_proposal=rpn),
        test_cfg=dict(rpn=rpn),
    )


def hrnet(*channels):
    """HRNet with one block of each kind."""

    def stage(number, block='BASIC'):
        return dict(
            num_modules=1,
            num_branches=number,
            block=block,
            num_blocks=(1,) * number,
            num_channels=channels[:number] if number > 1 else (4,),
        )

    return {'stage1': stage(1, 'BOTTLENECK'), **{f'stage{n}': stage(n) for n in (2, 3, 4)}}


def boxes_sample(index, size):
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    height, width = size
    sample = DetDataSample(metainfo=dict(
        img_shape=size, ori_shape=size, pad_shape=size, batch_input_shape=size, img_id=index,
        scale_factor=(1.0, 1.0), instance_idx=index,
    ))  # fmt: skip
    box = torch.tensor([[4.0, 4.0, width - 4.0, height - 4.0]])
    sample.gt_instances = InstanceData(bboxes=box, labels=torch.tensor([1]))
    sample.ignored_instances = InstanceData(bboxes=box[:0], labels=torch.zeros(0).long())
    return sample


def masks_sample(index, size):
    from mmdet.structures.mask import BitmapMasks

    sample = boxes_sample(index, size)
    mask = np.zeros((1, *size), dtype=np.uint8)
    mask[:, 4:-4, 4:-4] = 1
    sample.gt_instances.masks = BitmapMasks(mask, *size)
    return sample


def map_sample(index, size):
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    sample = SegDataSample(metainfo=dict(
        img_shape=size, ori_shape=size, pad_shape=size, img_path='none', instance_idx=index
    ))  # fmt: skip
    sample.gt_sem_seg = PixelData(data=(torch.arange(size[0] * size[1]).view(1, *size) % 2))
    return sample


def class_sample(index, size):
    from mmpretrain.structures import DataSample

    sample = DataSample(metainfo=dict(instance_idx=index))
    return sample.set_gt_label(index % 2)


SAMPLES = dict(mmdet=boxes_sample, masks=masks_sample, mmseg=map_sample, mmpretrain=class_sample)


class Pictures(Dataset):
    """Random pictures of one size with something on them."""

    metainfo = dict(classes=('a', 'b'))

    def __init__(self, kind, n, size):
        self.kind, self.size = kind, (size, size)
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (n, 3, size, size), generator=generator, dtype=torch.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        sample = SAMPLES[self.kind](index, self.size)
        return dict(inputs=self.images[index], data_samples=sample)


def register(scope):
    """Let a package register its classes, and be the default scope."""
    importlib.import_module(f'{scope}.utils').register_all_modules(init_default_scope=False)
    init_default_scope(scope)


def make_runner(scope, model, work_dir, hooks=(), size=64, **changes):
    """A runner for two steps of two pictures each, and a test."""
    register(scope)
    loader = dict(
        dataset=Pictures('masks' if 'mask_head' in model.get('roi_head', ()) else scope, 4, size),
        sampler=dict(type='DefaultSampler', shuffle=False),
        batch_size=2,
        num_workers=0,
        collate_fn=dict(type='pseudo_collate'),
    )
    arguments = dict(
        model=model,
        work_dir=str(work_dir),
        train_dataloader=loader,
        train_cfg=dict(by_epoch=False, max_iters=2),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        test_dataloader=loader,
        test_cfg=dict(),
        test_evaluator=[],
        custom_hooks=list(hooks),
        default_hooks=dict(checkpoint=None, logger=dict(type='LoggerHook', interval=1)),
        log_processor=dict(by_epoch=False),
        default_scope=scope,
        experiment_name=f'test-{uuid.uuid4()}',
        cfg=Config(),
    )
    return Runner(**{**arguments, **changes})
