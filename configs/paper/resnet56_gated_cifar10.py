_base_ = 'resnet20_gated_cifar10.py'
model = dict(backbone=dict(depth=56))
load_from = 'work_dirs/paper/resnet56_bas_cifar10/epoch_100.pth'
work_dir = 'work_dirs/paper/resnet56_gated_cifar10'
