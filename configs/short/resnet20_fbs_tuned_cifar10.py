# Feature boosting and suppression at the same cost: the share of channels to keep is given, so there is nothing to control. As
# under the budget, channels are closed over a third of the training, and the gates start close to leaving the network as it is.
_base_ = 'resnet20_baseline_tuned_cifar10.py'
model = dict(backbone=dict(gate=dict(_delete_=True, type='FBSGate', density=0.43, weight_scale=0.1)))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(decay_mult=0.)}))
custom_hooks = [dict(type='DensityHook', epochs=1.8), dict(type='GatedMACsHook')]
work_dir = 'work_dirs/short/resnet20_fbs_tuned_cifar10'
