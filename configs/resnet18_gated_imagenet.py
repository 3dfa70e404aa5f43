# The classifier of resnet18_baseline_imagenet.py with gates, at the paper's cost. Its own recipe is in
# configs/paper/. This one differs, because it is one training, and from public weights:
# start   A dense classifier. The paper's gates first learn by batch shaping alone, for 100 epochs.
# budget  Saves 42.2 % of the backbone's MACs, met after 39 of 130 epochs, in place of a fixed rho.
# gates   Rate, batch norm and no weight decay are the paper's: 0.1 and 32 pictures a process are enough.
_base_ = ['resnet18_baseline_imagenet.py', '_base_/gating.py']
model = dict(backbone=dict(type='GatedResNet', gate=_base_.classifier_gate))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(decay_mult=0.)}))
custom_hooks = [dict(type='BudgetHook', save=0.422, reach=0.3), dict(type='GatedMACsHook')]
