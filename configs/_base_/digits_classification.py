# 32x32 pictures of handwritten digits in the tree of ImageNet, and a short schedule.
_base_ = 'mmpretrain::_base_/default_runtime.py'
demo_data = dict(root='data/demo', kinds=['classification'])
data_root = 'data/demo/classification/'
data_preprocessor = dict(
    num_classes=10, mean=[127.5, 127.5, 127.5], std=[64.0, 64.0, 64.0], to_rgb=True)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomCrop', crop_size=32, padding=3),
    dict(type='Rotate', magnitude_range=(0., 15.), magnitude_level=10, magnitude_std='inf', prob=0.5),
    dict(type='ColorJitter', brightness=0.3, contrast=0.3, saturation=0.3, hue=0.1),
    dict(type='Resize', scale=64),  # the stem of a ResNet divides by 4
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=64),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='CustomDataset', data_root=data_root, data_prefix='train', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=64,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CustomDataset', data_root=data_root, data_prefix='val', pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=(1, 5))
test_evaluator = val_evaluator

max_epochs = 24
train_cfg = dict(by_epoch=True, max_epochs=max_epochs, val_interval=max_epochs)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
auto_scale_lr = dict(base_batch_size=64)
default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(interval=max_epochs, max_keep_ckpts=1))
randomness = dict(seed=0, deterministic=False)
