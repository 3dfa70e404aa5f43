# Dense ResNet-18, trained on from OpenMMLab's weights: what the rows with gates are compared with.
_base_ = ['mmpretrain::_base_/models/resnet18.py', '_base_/imagenet.py']
load_from = 'https://download.openmmlab.com/mmclassification/v0/resnet/resnet18_8xb32_in1k_20210831-fbbb1da6.pth'
