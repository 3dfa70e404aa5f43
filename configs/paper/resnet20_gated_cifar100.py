# Stage 2 of 2, without coupling ("w/o FGC"): the sparsity loss alone.
_base_ = ['resnet20_baseline_cifar100.py', '_base_/gating.py']
load_from = 'work_dirs/paper/resnet20_bas_cifar100/epoch_100.pth'
model = dict(backbone=dict(gate=dict(_delete_=True, **_base_.gate)))
optim_wrapper = dict(paramwise_cfg=_base_.no_decay)
custom_hooks = [dict(type='L0Hook', rho=_base_.rho), dict(type='GatedMACsHook')]
work_dir = 'work_dirs/paper/resnet20_gated_cifar100'
