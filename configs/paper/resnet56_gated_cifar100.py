_base_ = 'resnet20_gated_cifar100.py'
model = dict(backbone=dict(depth=56))
load_from = 'work_dirs/paper/resnet56_bas_cifar100/epoch_100.pth'
work_dir = 'work_dirs/paper/resnet56_gated_cifar100'
