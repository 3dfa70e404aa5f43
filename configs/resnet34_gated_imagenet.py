# The classifier of resnet34_baseline_imagenet.py with gates, at the cost of the paper's ResNet-18: 42.2 % of
# the backbone's MACs saved. The recipe, and where it differs from the paper: resnet18_gated_imagenet.py.
_base_ = ['resnet34_baseline_imagenet.py', '_base_/gating.py']
model = dict(backbone=dict(type='GatedResNet', gate=_base_.classifier_gate))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(decay_mult=0.)}))
custom_hooks = [dict(type='BudgetHook', save=0.422, reach=0.3), dict(type='GatedMACsHook')]
