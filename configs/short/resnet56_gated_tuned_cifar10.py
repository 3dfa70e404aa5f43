# Gated ResNet-56, without coupling, fine-tuned as resnet20_gated_tuned_cifar10.py is.
_base_ = 'resnet20_gated_tuned_cifar10.py'
model = dict(backbone=dict(depth=56))
load_from = 'work_dirs/weights/resnet56_cifar10.pth'
work_dir = 'work_dirs/short/resnet56_gated_tuned_cifar10'
