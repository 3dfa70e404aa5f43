# resnet18_digits_gated.py at half the cost of its backbone, from its trained dense twin: train
# configs/demo/resnet18_digits.py first. Short, because only gates are new.
_base_ = 'resnet18_digits_gated.py'
load_from = 'work_dirs/resnet18_digits/epoch_24.pth'
max_epochs = 6
optim_wrapper = dict(
    optimizer=dict(lr=0.02),
    paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=10., decay_mult=0.)}))
train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = [
    dict(type='CosineAnnealingLR', T_max=max_epochs, by_epoch=True, convert_to_iter_based=True)
]
default_hooks = dict(checkpoint=dict(interval=max_epochs))
custom_hooks = [
    dict(type='BudgetHook', target=0.5, reach=0.3),
    dict(type='GatedMACsHook'),
]
