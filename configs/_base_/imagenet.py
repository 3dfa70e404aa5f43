# ImageNet with the paper's schedule: lr 0.1, x0.1 at 40, 70 and 100 of 130 epochs. The batch of 256
# is 8 processes of 32 pictures; with fewer, set train_dataloader.batch_size or --auto-scale-lr.
_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs32.py',
    'mmpretrain::_base_/schedules/imagenet_bs256.py',
    'mmpretrain::_base_/default_runtime.py'
]
custom_imports = dict(imports=['fgc_mm'])
optim_wrapper = dict(optimizer=dict(nesterov=True))
param_scheduler = dict(milestones=[40, 70, 100])
train_cfg = dict(max_epochs=130, val_interval=5)
default_hooks = dict(checkpoint=dict(interval=5, max_keep_ckpts=2))
