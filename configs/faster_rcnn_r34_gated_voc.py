# The detector of faster_rcnn_r34_baseline_voc.py with gates, at the paper's cost: 52 % of the backbone's
# MACs saved. The recipe, and where it differs from the paper: faster_rcnn_r50_gated_voc.py.
_base_ = ['faster_rcnn_r34_baseline_voc.py', '_base_/gating.py']
model = dict(backbone=dict(type='GatedResNet', gate=_base_.gate))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=20., decay_mult=0.)}))
custom_hooks = [dict(type='BudgetHook', save=0.52, reach=1 / 3), dict(type='GatedMACsHook')]
