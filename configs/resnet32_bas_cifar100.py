_base_ = 'resnet20_bas_cifar100.py'
model = dict(backbone=dict(depth=32))
