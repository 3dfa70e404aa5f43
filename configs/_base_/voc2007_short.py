# Pieces of the short detection protocol, taken by name (`_base_.short_scale`, ...): small pictures, 200 of them
# for five epochs of training and 100 for the test, and the public caffe-style ResNet-50. Nothing here acts by itself.
short_scale = (320, 240)
short_pipelines = dict(
    train=[
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True),
        dict(type='Resize', scale=short_scale, keep_ratio=True),
        dict(type='RandomFlip', prob=0.5),
        dict(type='PackDetInputs'),
    ],
    test=[
        dict(type='LoadImageFromFile'),
        dict(type='Resize', scale=short_scale, keep_ratio=True),
        dict(type='LoadAnnotations', with_bbox=True),
        dict(
            type='PackDetInputs',
            meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
    ])
# Blue first, no scaling, the stride in the 1x1 convolution.
short_preprocessor = dict(mean=[103.939, 116.779, 123.68], std=[1.0, 1.0, 1.0], bgr_to_rgb=False)
short_backbone = dict(style='caffe', norm_cfg=dict(type='BN', requires_grad=False))
# A quarter of the usual proposals: the pictures are small.
short_rcnn = dict(rcnn=dict(sampler=dict(num=128)))
short_weights = 'data/weights/resnet50_caffe_bgr_imagenet.pth'
short_schedule = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type='MultiStepLR', begin=0, end=5, by_epoch=True, milestones=[4], gamma=0.1),
]
