_base_ = 'resnet20_bas_cifar10.py'
model = dict(backbone=dict(depth=32))
work_dir = 'work_dirs/paper/resnet32_bas_cifar10'
