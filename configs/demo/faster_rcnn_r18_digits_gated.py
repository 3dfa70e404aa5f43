# faster_rcnn_r18_digits.py with a channel gate in every block, without coupling.
_base_ = 'faster_rcnn_r18_digits.py'
model = dict(
    backbone=dict(
        type='GatedResNet',
        # Batch norm over the eight pooled vectors of a batch is noise.
        gate=dict(type='BinConcreteGate', norm_cfg=dict(type='LN'), bias_init=2.)))
# Eight epochs are short: gates learn faster than the rest.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=2., decay_mult=0.)}))
custom_hooks = [
    dict(type='L0Hook', rho=dict(start=0, end=2, value=0.8)),
    dict(type='BatchShapingHook', zeta=dict(start=0, end=6, begin=0.005, value=0), history=7),
    dict(type='GatedMACsHook'),
]
