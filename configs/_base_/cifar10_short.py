# CIFAR-10 from the binary files, and a schedule of minutes that starts from a trained dense network.
_base_ = 'mmpretrain::_base_/default_runtime.py'
data_root = 'data/cifar10'
# The dense networks were trained with ImageNet's mean and spread.
data_preprocessor = dict(
    num_classes=10, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=False)
train_pipeline = [
    dict(type='RandomCrop', crop_size=32, padding=4),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [dict(type='PackInputs')]
train_dataloader = dict(
    batch_size=128,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='CIFARBinary', data_root=data_root, split='train', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=250,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='CIFARBinary', data_root=data_root, split='test', pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=(1, 5))
test_evaluator = val_evaluator

max_epochs = 6
train_cfg = dict(by_epoch=True, max_epochs=max_epochs, val_interval=max_epochs)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4))
param_scheduler = dict(
    type='CosineAnnealingLR', T_max=max_epochs, by_epoch=True, convert_to_iter_based=True)
auto_scale_lr = dict(base_batch_size=128)
default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(interval=1, max_keep_ckpts=1))
randomness = dict(seed=0)
