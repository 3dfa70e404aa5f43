_base_ = 'resnet20_baseline_cifar10.py'
model = dict(backbone=dict(depth=56))
