# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""FGCHook on detectors and segmentors."""

import numpy as np
import pytest
from fgc_watch import FGC, Watch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS
from mmengine.runner import Runner


def test_detection(tmp_path):
    pytest.importorskip('mmdet.models')
    cv2 = pytest.importorskip('cv2')

    class Boxes(BaseDataset):
        METAINFO = dict(classes=('thing',))

        def load_data_list(self):
            rng, items = np.random.default_rng(0), []
            for i in range(6):
                path = str(tmp_path / f'{i}.png')
                cv2.imwrite(path, rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
                box = dict(bbox=[8, 8, 40, 48], bbox_label=0, ignore_flag=0)
                items.append(dict(img_path=path, img_id=i, height=64, width=64, instances=[box]))
            return items

    DATASETS.register_module(name='FGCBoxes', module=Boxes, force=True)
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True),
        dict(type='PackDetInputs'),
    ]
    backbone = dict(type='GatedResNet', depth=18, base_channels=8, stem_channels=8,
                    gate=dict(type='BinConcreteGate', norm_cfg=dict(type='LN')))  # fmt: skip
    anchors = dict(
        type='AnchorGenerator', octave_base_scale=4, scales_per_octave=1, ratios=[1.0],
        strides=[8, 16, 32, 64, 128],
    )  # fmt: skip
    coder = dict(type='DeltaXYWHBBoxCoder')
    assigner = dict(
        type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.4, min_pos_iou=0, ignore_iof_thr=-1
    )
    model = dict(
        type='RetinaNet',
        data_preprocessor=dict(type='DetDataPreprocessor', pad_size_divisor=32),
        backbone=backbone,
        neck=dict(type='FPN', in_channels=[8, 16, 32, 64], out_channels=16, start_level=1,
                  add_extra_convs='on_input', num_outs=5),
        bbox_head=dict(type='RetinaHead', num_classes=1, in_channels=16, stacked_convs=1,
                       feat_channels=16, anchor_generator=anchors, bbox_coder=coder),
        train_cfg=dict(assigner=assigner, sampler=dict(type='PseudoSampler'), allowed_border=-1,
                       pos_weight=-1, debug=False),
        test_cfg=dict(),
    )  # fmt: skip
    hook = dict(type='FGCHook', k=1, eta=1e-2, form='log_sum', log_interval=1)
    watch = run_task('mmdet', model, dict(type='mmengine.FGCBoxes', pipeline=pipeline), hook,
                     tmp_path)  # fmt: skip
    assert list(watch.banks) == ['backbone.gates.layer4-0-conv1', 'backbone.gates.layer4-1-conv1']
    watch.check(steps=2, k=1, eta=1e-2)


def test_segmentation(tmp_path):
    pytest.importorskip('mmseg.models')
    cv2 = pytest.importorskip('cv2')
    rng = np.random.default_rng(0)
    for folder in ('images', 'maps'):
        (tmp_path / folder).mkdir()
    for i in range(6):
        picture = rng.integers(0, 256, (48, 48, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / 'images' / f'{i}.jpg'), picture)
        cv2.imwrite(str(tmp_path / 'maps' / f'{i}.png'), picture[:, :, 0] // 64)
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations'),
        dict(type='PackSegInputs'),
    ]
    dataset = dict(
        type='BaseSegDataset', data_root=str(tmp_path), pipeline=pipeline,
        data_prefix=dict(img_path='images', seg_map_path='maps'),
        metainfo=dict(classes=tuple('abcd'), palette=[[i, 0, 0] for i in range(4)]),
    )  # fmt: skip
    backbone = dict(
        type='GatedResNet', depth=18, base_channels=8, stem_channels=8, out_indices=(3,)
    )
    model = dict(
        type='EncoderDecoder',
        data_preprocessor=dict(type='SegDataPreProcessor', size=(48, 48)),
        backbone=backbone,
        decode_head=dict(type='FCNHead', in_channels=64, in_index=0, channels=8, num_convs=1,
                         num_classes=4, norm_cfg=dict(type='BN')),
        train_cfg=dict(),
        test_cfg=dict(mode='whole'),
    )  # fmt: skip
    watch = run_task('mmseg', model, dataset, {**FGC, 'layers': ['layer4.1'], 'k': 4}, tmp_path)
    assert list(watch.banks) == ['backbone.gates.layer4-1-conv1']
    watch.check(steps=2, k=4)


def run_task(scope, model, dataset, hook, tmp_path):
    cfg = dict(
        default_scope=scope,
        work_dir=str(tmp_path / 'work'),
        experiment_name=f'{scope}-{tmp_path.name}',
        model=model,
        train_dataloader=dict(
            batch_size=3,
            num_workers=0,
            dataset=dataset,
            sampler=dict(type='DefaultSampler', shuffle=True),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        default_hooks=dict(checkpoint=None, logger=dict(type='LoggerHook', interval=1)),
        custom_hooks=[hook],
        randomness=dict(seed=0),
    )
    runner = Runner(**cfg, cfg=Config())
    watch = Watch()
    runner.register_hook(watch)
    runner.train()
    return watch
