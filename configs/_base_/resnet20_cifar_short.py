# Dense ResNet-20 for CIFAR-10, from public weights:
# tools/convert_weights.py data/weights/resnet20-12fca82f.th work_dirs/weights/resnet20_cifar10.pth
_base_ = 'cifar10_short.py'
model = dict(
    type='ImageClassifier',
    backbone=dict(type='GatedResNetCifar', depth=20, gate=None),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
load_from = 'work_dirs/weights/resnet20_cifar10.pth'
