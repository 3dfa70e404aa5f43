# ResNet-20 from dense weights in six epochs. Gates that close one channel in eight from the first step on would
# undo what the network knows: they start nearly sure to be open, and learn faster than the rest.
# The weights: tools/convert_weights.py data/weights/resnet20-12fca82f.th work_dirs/weights/resnet20_cifar10.pth
_base_ = '../_base_/cifar10_short.py'
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='GatedResNetCifar', depth=20, gate=dict(type='BinConcreteGate', bias_init=3.)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
load_from = 'work_dirs/weights/resnet20_cifar10.pth'
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=10., decay_mult=0.)}))
custom_hooks = [
    dict(type='BatchShapingHook', zeta=dict(start=0, end=4, begin=0.02, value=0)),
    dict(type='L0Hook', rho=dict(start=0, end=2, value=1.)),
    dict(type='GatedMACsHook'),
]
work_dir = 'work_dirs/short/resnet20_gated_cifar10'
