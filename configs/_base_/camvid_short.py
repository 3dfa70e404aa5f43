# 80 street pictures of CamVid in the tree of Cityscapes, and a schedule of minutes. Of the classes of Cityscapes only
# those that CamVid has: a class that no picture shows would count as missed wherever it is guessed.
_base_ = 'mmseg::_base_/default_runtime.py'
data_root = 'data/camvid/'
metainfo = dict(
    classes=('road', 'sidewalk', 'building', 'fence', 'pole', 'traffic sign', 'vegetation', 'sky', 'person', 'rider', 'car'),
    palette=[[128, 64, 128], [244, 35, 232], [70, 70, 70], [190, 153, 153], [153, 153, 153], [220, 220, 0], [107, 142, 35],
             [70, 130, 180], [220, 20, 60], [255, 0, 0], [0, 0, 142]])
# Two thirds of the 480 x 360 pixels.
scale = (320, 240)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=scale, ratio_range=(1.0, 1.5), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(240, 320), cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
# Annotations stay as large as they are: the prediction is resized to them.
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='CityscapesDataset',
        data_root=data_root,
        data_prefix=dict(img_path='leftImg8bit/train', seg_map_path='gtFine/train'),
        metainfo=metainfo,
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=1,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CityscapesDataset',
        data_root=data_root,
        data_prefix=dict(img_path='leftImg8bit/val', seg_map_path='gtFine/val'),
        metainfo=metainfo,
        test_mode=True,
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator

max_epochs = 10
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=max_epochs)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=0.01, momentum=0.9, weight_decay=5e-4),
    paramwise_cfg=dict(custom_keys={'head': dict(lr_mult=10.)}))
param_scheduler = [
    dict(type='PolyLR', power=0.9, end=max_epochs, by_epoch=True, convert_to_iter_based=True)
]
auto_scale_lr = dict(base_batch_size=4)
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=5),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=1),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='SegVisualizationHook'))
log_processor = dict(by_epoch=True)
randomness = dict(seed=0)
