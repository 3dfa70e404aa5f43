# Fine-tunes the gated ResNet-34 of resnet34_gated_imagenet.py, without coupling ("w/o FGC").
_base_ = ['../faster_rcnn_r34_baseline_voc.py', '_base_/gating.py']
model = dict(
    backbone=dict(
        type='GatedResNet',
        gate=_base_.finetuned_gate,
        init_cfg=dict(
            checkpoint='work_dirs/paper/resnet34_gated_imagenet/epoch_130.pth', prefix='backbone.')))
optim_wrapper = dict(paramwise_cfg=_base_.no_decay)
custom_hooks = [dict(type='L0Hook', rho=0.4), dict(type='GatedMACsHook')]
work_dir = 'work_dirs/paper/faster_rcnn_r34_gated_voc'
