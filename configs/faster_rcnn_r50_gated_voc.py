# The detector of faster_rcnn_r50_baseline_voc.py with gates, at the paper's cost. Its own recipe is in
# configs/paper/. This one differs, because it needs nothing but VOC and public weights:
# start   Dense ImageNet weights. The paper's come from 230 epochs of gated training on ImageNet.
# budget  Saves 34.3 % of the backbone's MACs, met after 4 of 12 epochs. The paper's rho closes nothing in 12.
# gates   Layer norm, as two pictures are no batch, and 20 x the rate: 0.001 hardly moves new gates.
_base_ = ['faster_rcnn_r50_baseline_voc.py', '_base_/gating.py']
model = dict(backbone=dict(type='GatedResNet', gate=_base_.gate))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=20., decay_mult=0.)}))
custom_hooks = [dict(type='BudgetHook', save=0.343, reach=1 / 3), dict(type='GatedMACsHook')]
