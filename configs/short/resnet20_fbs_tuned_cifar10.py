# Feature boosting and suppression at the same cost: the share of channels to keep is given, so there is nothing to control.
_base_ = 'resnet20_baseline_tuned_cifar10.py'
model = dict(backbone=dict(gate=dict(_delete_=True, type='FBSGate', density=0.43)))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(decay_mult=0.)}))
custom_hooks = [dict(type='GatedMACsHook')]
work_dir = 'work_dirs/short/resnet20_fbs_tuned_cifar10'
