# resnet18_digits.py with a channel gate in every block, without coupling.
_base_ = 'resnet18_digits.py'
model = dict(backbone=dict(type='GatedResNet', gate=dict(type='BinConcreteGate', bias_init=2.)))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(decay_mult=0.)}))
custom_hooks = [
    dict(type='L0Hook', rho=dict(start=0, end=6, value=0.5)),
    dict(type='BatchShapingHook', zeta=dict(start=0, end=12, begin=0.02, value=0)),
    dict(type='GatedMACsHook'),
]
