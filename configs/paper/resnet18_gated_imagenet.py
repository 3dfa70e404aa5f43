# Stage 2 of 2, without coupling ("w/o FGC"): the sparsity loss alone.
_base_ = ['resnet18_baseline_imagenet.py', '_base_/gating.py']
load_from = 'work_dirs/paper/resnet18_bas_imagenet/epoch_100.pth'
model = dict(backbone=dict(type='GatedResNet', gate=_base_.gate))
optim_wrapper = dict(paramwise_cfg=_base_.no_decay)
custom_hooks = [dict(type='L0Hook', rho=_base_.rho), dict(type='GatedMACsHook')]
work_dir = 'work_dirs/paper/resnet18_gated_imagenet'
