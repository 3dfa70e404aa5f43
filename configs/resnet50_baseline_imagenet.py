# Dense ResNet-50, trained on from OpenMMLab's weights: what the rows with gates are compared with.
_base_ = ['mmpretrain::_base_/models/resnet50.py', '_base_/imagenet.py']
load_from = 'https://download.openmmlab.com/mmclassification/v0/resnet/resnet50_8xb32_in1k_20210831-ea4938fc.pth'
