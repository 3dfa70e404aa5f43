_base_ = 'resnet20_baseline_cifar100.py'
model = dict(backbone=dict(depth=56))
work_dir = 'work_dirs/paper/resnet56_baseline_cifar100'
