# Fine-tunes the gated ResNet-50 of resnet50_gated_imagenet.py, without coupling ("w/o FGC").
_base_ = ['../pspnet_r50_baseline_cityscapes.py', '_base_/gating.py']
model = dict(
    pretrained=None,
    backbone=dict(
        type='GatedResNet',
        gate=_base_.finetuned_gate,
        init_cfg=dict(
            type='Pretrained',
            checkpoint='work_dirs/paper/resnet50_gated_imagenet/epoch_130.pth',
            prefix='backbone.')))
# The gates' weight decay is 2e-6, of 5e-4.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(decay_mult=0.004)}))
custom_hooks = [dict(type='L0Hook', rho=0.4), dict(type='GatedMACsHook')]
work_dir = 'work_dirs/paper/pspnet_r50_gated_cityscapes'
