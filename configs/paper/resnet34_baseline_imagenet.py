# Dense ResNet-34. The paper tells the schedule for ResNet-18; the same here is our choice.
_base_ = ['mmpretrain::_base_/models/resnet34.py', '_base_/imagenet.py']
work_dir = 'work_dirs/paper/resnet34_baseline_imagenet'
