# Dense ResNet-50. The paper tells the schedule for ResNet-18; the same here is our choice.
_base_ = ['mmpretrain::_base_/models/resnet50.py', '_base_/imagenet.py']
work_dir = 'work_dirs/paper/resnet50_baseline_imagenet'
