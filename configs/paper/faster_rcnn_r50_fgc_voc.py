# Fine-tunes the gated ResNet-50 of resnet50_fgc_imagenet.py with coupling in the last stage. The
# warm-up of one epoch is our choice: until then most rows of the banks are still random.
_base_ = 'faster_rcnn_r50_gated_voc.py'
model = dict(
    backbone=dict(
        init_cfg=dict(checkpoint='work_dirs/paper/resnet50_fgc_imagenet/epoch_130.pth')))
custom_hooks = _base_.custom_hooks + [
    dict(layers='last_stage', k=1, warmup_epochs=1, **_base_.finetuned_fgc)
]
work_dir = 'work_dirs/paper/faster_rcnn_r50_fgc_voc'
