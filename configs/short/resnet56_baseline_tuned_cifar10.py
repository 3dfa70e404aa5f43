# Dense ResNet-56, fine-tuned as resnet20_baseline_tuned_cifar10.py is.
_base_ = 'resnet20_baseline_tuned_cifar10.py'
model = dict(backbone=dict(depth=56))
load_from = 'work_dirs/weights/resnet56_cifar10.pth'
work_dir = 'work_dirs/short/resnet56_baseline_tuned_cifar10'
