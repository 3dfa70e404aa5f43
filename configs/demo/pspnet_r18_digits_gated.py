# pspnet_r18_digits.py with a channel gate in every block, without coupling. This small network learns late, and not
# at all while gates close channels at random. So it starts from its trained dense twin, as one would with
# weights of one's own: train configs/demo/pspnet_r18_digits.py first.
_base_ = 'pspnet_r18_digits.py'
model = dict(
    backbone=dict(
        type='GatedResNetV1c',
        # Pooled over a whole scene, pictures look alike: batch norm brings out how they differ.
        gate=dict(type='BinConcreteGate', norm_cfg=dict(type='BN1d'), bias_init=3.)))
load_from = 'work_dirs/pspnet_r18_digits/epoch_16.pth'
# Fewer epochs and half the learning rate, but not for the gates, which are new.
max_epochs = 10
optim_wrapper = dict(
    optimizer=dict(lr=5e-4),
    paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=10., decay_mult=0.)}))
train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = [
    dict(type='CosineAnnealingLR', T_max=max_epochs, by_epoch=True, convert_to_iter_based=True)
]
default_hooks = dict(checkpoint=dict(interval=max_epochs))
custom_hooks = [
    dict(type='L0Hook', rho=dict(start=0, end=2, value=0.35)),
    dict(type='BatchShapingHook', zeta=dict(start=0, end=3, begin=0.01, value=0), history=7),
    dict(type='GatedMACsHook'),
]
