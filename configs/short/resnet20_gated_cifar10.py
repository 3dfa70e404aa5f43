# ResNet-20 from dense weights in six epochs. Gates that close one channel in eight from the first step on would
# undo what the network knows: they start nearly sure to be open, and learn faster than the rest.
_base_ = '../_base_/resnet20_cifar_short.py'
model = dict(backbone=dict(gate=dict(_delete_=True, type='BinConcreteGate', bias_init=3.)))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=10., decay_mult=0.)}))
custom_hooks = [
    dict(type='BatchShapingHook', zeta=dict(start=0, end=4, begin=0.02, value=0)),
    dict(type='L0Hook', rho=dict(start=0, end=2, value=1.)),
    dict(type='GatedMACsHook'),
]
work_dir = 'work_dirs/short/resnet20_gated_cifar10'
