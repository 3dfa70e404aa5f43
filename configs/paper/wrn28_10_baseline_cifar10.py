# Dense WideResNet-28-10.
_base_ = [
    'mmpretrain::_base_/models/resnet18_cifar.py',
    '_base_/cifar10.py',
    '_base_/schedule_200e.py'
]
model = dict(
    backbone=dict(
        _delete_=True, type='GatedWideResNet', depth=28, widen_factor=10, gate=None),
    head=dict(in_channels=640))
auto_scale_lr = dict(base_batch_size=256)
work_dir = 'work_dirs/paper/wrn28_10_baseline_cifar10'
