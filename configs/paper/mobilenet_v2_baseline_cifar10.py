# Dense MobileNetV2. The paper does not tell its strides for pictures of 32 x 32; these are ours
# and end at 4 x 4.
_base_ = [
    'mmpretrain::_base_/models/mobilenet_v2_1x.py',
    '_base_/cifar10.py',
    '_base_/schedule_200e.py'
]
model = dict(
    backbone=dict(
        type='GatedMobileNetV2', gate=None, stem_stride=1, strides=(1, 1, 2, 2, 1, 2, 1)),
    head=dict(num_classes=10, topk=(1, )))
auto_scale_lr = dict(base_batch_size=256)
work_dir = 'work_dirs/paper/mobilenet_v2_baseline_cifar10'
