# A quarter-width ResNet-18 classifier of handwritten digits.
_base_ = [
    'mmpretrain::_base_/models/resnet18.py',
    '../_base_/digits_classification.py'
]
model = dict(
    backbone=dict(base_channels=16, stem_channels=16),
    head=dict(num_classes=10, in_channels=128, topk=(1, 5)))
