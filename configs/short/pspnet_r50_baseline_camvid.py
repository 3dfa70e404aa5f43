# Dense PSPNet in ten epochs on 60 small street pictures, from public ImageNet weights in caffe style (blue first, no scaling,
# the stride in the 1x1). For two CPU cores: stride 16 in place of 8, and heads a quarter as wide.
_base_ = ['mmseg::_base_/models/pspnet_r50-d8.py', '../_base_/camvid_short.py']
norm_cfg = dict(type='BN', requires_grad=True)
model = dict(
    data_preprocessor=dict(
        size=(240, 320),
        mean=[103.939, 116.779, 123.68],
        std=[1.0, 1.0, 1.0],
        bgr_to_rgb=False),
    pretrained=None,
    backbone=dict(
        type='ResNet',
        style='caffe',
        strides=(1, 2, 2, 1),
        dilations=(1, 1, 1, 2),
        # Four pictures: the statistics of ImageNet are better than theirs.
        norm_cfg=dict(type='BN', requires_grad=False),
        norm_eval=True,
        init_cfg=dict(
            type='Pretrained', checkpoint='data/weights/resnet50_caffe_bgr_imagenet.pth')),
    decode_head=dict(channels=128, num_classes=11, norm_cfg=norm_cfg),
    auxiliary_head=dict(channels=64, num_classes=11, norm_cfg=norm_cfg))
work_dir = 'work_dirs/short/pspnet_r50_baseline_camvid'
