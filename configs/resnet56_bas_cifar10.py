_base_ = 'resnet20_bas_cifar10.py'
model = dict(backbone=dict(depth=56))
