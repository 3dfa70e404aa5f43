# Fine-tunes the gated ResNet-50 of resnet50_gated_imagenet.py, without coupling ("w/o FGC").
# From dense weights instead: docs/configs.md.
_base_ = ['faster_rcnn_r50_baseline_voc.py', '_base_/gating.py']
model = dict(
    backbone=dict(
        type='GatedResNet',
        gate=_base_.finetuned_gate,
        init_cfg=dict(
            checkpoint='work_dirs/resnet50_gated_imagenet/epoch_130.pth', prefix='backbone.')))
optim_wrapper = dict(paramwise_cfg=_base_.no_decay)
custom_hooks = [dict(type='L0Hook', rho=_base_.rho), dict(type='GatedMACsHook')]
