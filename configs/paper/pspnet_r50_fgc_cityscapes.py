# Fine-tunes the gated ResNet-50 of resnet50_fgc_imagenet.py with coupling in the last stage. The
# warm-up is our choice: 5 % of the training, as the authors have on CIFAR-10.
_base_ = 'pspnet_r50_gated_cityscapes.py'
model = dict(
    backbone=dict(init_cfg=dict(checkpoint='work_dirs/paper/resnet50_fgc_imagenet/epoch_130.pth')))
custom_hooks = _base_.custom_hooks + [
    dict(layers='last_stage', k=4, warmup_epochs=15, **_base_.finetuned_fgc)
]
work_dir = 'work_dirs/paper/pspnet_r50_fgc_cityscapes'
