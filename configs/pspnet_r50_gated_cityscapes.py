# Fine-tunes the gated ResNet-50 of resnet50_gated_imagenet.py, without coupling ("w/o FGC").
# From dense weights instead: docs/configs.md.
_base_ = ['pspnet_r50_baseline_cityscapes.py', '_base_/gating.py']
model = dict(
    pretrained=None,
    backbone=dict(
        type='GatedResNet',
        gate=_base_.finetuned_gate,
        init_cfg=dict(
            type='Pretrained',
            checkpoint='work_dirs/resnet50_gated_imagenet/epoch_130.pth',
            prefix='backbone.')))
# The gates' weight decay is 2e-6, of 5e-4.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(decay_mult=0.004)}))
custom_hooks = [dict(type='L0Hook', rho=_base_.rho), dict(type='GatedMACsHook')]
