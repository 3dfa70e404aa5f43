# Dense Faster R-CNN + FPN, ResNet-34.
_base_ = 'faster_rcnn_r50_baseline_voc.py'
model = dict(
    backbone=dict(depth=34, init_cfg=dict(checkpoint='torchvision://resnet34')),
    neck=dict(in_channels=[64, 128, 256, 512]))
