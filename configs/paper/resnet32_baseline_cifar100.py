_base_ = 'resnet20_baseline_cifar100.py'
model = dict(backbone=dict(depth=32))
work_dir = 'work_dirs/paper/resnet32_baseline_cifar100'
