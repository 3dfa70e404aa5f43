# pspnet_r18_digits_gated.py at half the cost of its backbone. Like that it starts from its trained dense twin,
# configs/demo/pspnet_r18_digits.py, and is shorter still.
_base_ = 'pspnet_r18_digits_gated.py'
max_epochs = 3
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=20., decay_mult=0.)}))
train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = [
    dict(type='CosineAnnealingLR', T_max=max_epochs, by_epoch=True, convert_to_iter_based=True)
]
default_hooks = dict(checkpoint=dict(interval=max_epochs))
custom_hooks = [
    dict(type='BudgetHook', target=0.5, reach=0.4),
    dict(type='GatedMACsHook'),
]
