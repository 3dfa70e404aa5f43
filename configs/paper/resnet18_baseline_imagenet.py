# Dense ResNet-18.
_base_ = ['mmpretrain::_base_/models/resnet18.py', '_base_/imagenet.py']
work_dir = 'work_dirs/paper/resnet18_baseline_imagenet'
