# Dense ResNet-20.
_base_ = [
    'mmpretrain::_base_/models/resnet18_cifar.py',
    '_base_/cifar10.py',
    '_base_/schedule_400e.py'
]
model = dict(
    backbone=dict(_delete_=True, type='GatedResNetCifar', depth=20, gate=None),
    head=dict(in_channels=64))
work_dir = 'work_dirs/paper/resnet20_baseline_cifar10'
