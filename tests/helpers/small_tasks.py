# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Small detectors, segmentors and classifiers of the packages, and pictures for them."""

import uuid

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from mmengine.utils import digit_version
from torch.utils.data import Dataset

HOOKS_CFG = [
    dict(type='L0Hook', rho=0.4, cost='macs'),
    dict(type='BatchShapingHook', zeta=0.75, history=2),
    dict(type='GatedMACsHook'),
]
LN_GATE = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'))


def backbone(**kwargs):
    return dict(
        type='GatedResNet', depth=18, base_channels=8, stem_channels=8, gate=LN_GATE, **kwargs
    )


def classifier():
    return dict(
        type='ImageClassifier',
        data_preprocessor=dict(mean=[127.5] * 3, std=[60.0] * 3),
        backbone=backbone(out_indices=(3,)),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(
            type='LinearClsHead', num_classes=3, in_channels=64, loss=dict(type='CrossEntropyLoss')
        ),
    )


def class_sample(height, width):
    from mmpretrain.structures import DataSample

    return DataSample().set_gt_label(1)


def retinanet():
    assigner = dict(type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.4, min_pos_iou=0)
    return dict(
        type='RetinaNet',
        data_preprocessor=dict(
            type='DetDataPreprocessor', mean=[127.5] * 3, std=[60.0] * 3, pad_size_divisor=32
        ),
        backbone=backbone(),
        neck=dict(
            type='FPN',
            in_channels=[8, 16, 32, 64],
            out_channels=8,
            start_level=1,
            add_extra_convs='on_input',
            num_outs=5,
        ),
        bbox_head=dict(
            type='RetinaHead',
            num_classes=2,
            in_channels=8,
            stacked_convs=1,
            feat_channels=8,
            loss_bbox=dict(type='L1Loss'),
        ),
        train_cfg=dict(assigner=assigner, allowed_border=-1, pos_weight=-1),
        test_cfg=dict(
            nms_pre=20, score_thr=0.0, nms=dict(type='nms', iou_threshold=0.5), max_per_img=5
        ),
    )


def faster_rcnn():
    text = "_base_ = 'mmdet::_base_/models/faster-rcnn_r50_fpn.py'"
    base = Config.fromstring(text, '.py').model
    base.backbone = backbone(norm_eval=True, frozen_stages=1)
    base.neck.in_channels = [8, 16, 32, 64]
    for part in (base.neck, base.rpn_head):
        part.update(out_channels=8) if 'out_channels' in part else part.update(in_channels=8)
    base.rpn_head.feat_channels = 8
    base.roi_head.bbox_roi_extractor.out_channels = 8
    base.roi_head.bbox_head.update(in_channels=8, fc_out_channels=16, num_classes=2)
    base.test_cfg.rpn.update(nms_pre=20, max_per_img=10)
    base.train_cfg.rpn_proposal.update(nms_pre=20, max_per_img=10)
    return base


def boxes_sample(height, width):
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    sample = DetDataSample(
        metainfo=dict(
            img_shape=(height, width), ori_shape=(height, width), scale_factor=(1.0, 1.0), img_id=0
        )
    )
    box = torch.tensor([[4.0, 4.0, width - 4.0, height - 4.0]])
    sample.gt_instances = InstanceData(bboxes=box, labels=torch.tensor([1]))
    sample.ignored_instances = InstanceData(bboxes=box[:0], labels=torch.zeros(0).long())
    return sample


def segmentor(**test_cfg):
    return dict(
        type='EncoderDecoder',
        data_preprocessor=dict(
            type='SegDataPreProcessor',
            mean=[127.5] * 3,
            std=[60.0] * 3,
            size_divisor=32,
            test_cfg=dict(size_divisor=32),
            pad_val=0,
            seg_pad_val=255,
        ),
        backbone=backbone(strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4), contract_dilation=True),
        decode_head=dict(
            type='PSPHead',
            in_channels=64,
            in_index=3,
            channels=8,
            pool_scales=(1, 2),
            num_classes=3,
            dropout_ratio=0,
        ),
        test_cfg=test_cfg or dict(mode='whole'),
    )


def map_sample(height, width):
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    size = (height, width)
    sample = SegDataSample(
        metainfo=dict(img_shape=size, ori_shape=size, pad_shape=size, img_path='none')
    )
    sample.gt_sem_seg = PixelData(data=torch.ones(1, height, width, dtype=torch.long))
    return sample


class Images(Dataset):
    metainfo = dict(classes=('a', 'b', 'c'))

    def __init__(self, make_sample, sizes):
        generator = torch.Generator().manual_seed(0)
        self.items = [
            (torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8), size)
            for size in sizes
        ]
        self.make_sample = make_sample

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        image, size = self.items[index]
        return dict(inputs=image, data_samples=self.make_sample(*size))


def make_runner(
    scope, model, make_sample, sizes, work_dir, batch_size=2, images=Images, hooks=HOOKS_CFG
):
    loader = dict(
        dataset=images(make_sample, sizes),
        sampler=dict(type='DefaultSampler', shuffle=False),
        batch_size=batch_size,
        num_workers=0,
        collate_fn=dict(type='pseudo_collate'),
    )
    return Runner(
        model=Config(dict(model=model)).model,
        work_dir=str(work_dir),
        train_dataloader=loader,
        train_cfg=dict(by_epoch=False, max_iters=2, val_interval=2),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.001)),
        val_dataloader=loader,
        val_cfg=dict(),
        val_evaluator=[],
        test_dataloader=loader,
        test_cfg=dict(),
        test_evaluator=[],
        custom_hooks=hooks,
        default_hooks=dict(checkpoint=None, logger=dict(type='LoggerHook', interval=1)),
        log_processor=dict(by_epoch=False),
        default_scope=scope,
        experiment_name=f'test-{uuid.uuid4()}',
        cfg=Config(),
    )


def register(scope):
    module = pytest.importorskip(scope)
    module_utils = __import__(f'{scope}.utils', fromlist=['register_all_modules'])
    module_utils.register_all_modules(init_default_scope=False)
    init_default_scope(scope)
    return digit_version(module.__version__)
