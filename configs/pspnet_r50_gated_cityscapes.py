# The segmentor of pspnet_r50_baseline_cityscapes.py with gates, at the paper's cost. Its own recipe is in
# configs/paper/. This one differs, because it needs nothing but Cityscapes and public weights:
# start   Dense ImageNet weights. The paper's come from 230 epochs of gated training on ImageNet.
# budget  Saves 34.6 % of the backbone's MACs, met after 90 of 300 epochs, in place of a fixed rho.
# gates   Layer norm, as six pictures are no batch. Their weight decay is the paper's 2e-6, of 5e-4.
_base_ = ['pspnet_r50_baseline_cityscapes.py', '_base_/gating.py']
model = dict(backbone=dict(type='GatedResNet', gate=_base_.gate))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(decay_mult=0.004)}))
custom_hooks = [dict(type='BudgetHook', save=0.346, reach=0.3), dict(type='GatedMACsHook')]
