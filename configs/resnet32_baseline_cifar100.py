_base_ = 'resnet20_baseline_cifar100.py'
model = dict(backbone=dict(depth=32))
