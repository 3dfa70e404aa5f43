# Gates at the cost of the paper's ResNet-20 (55 % saved), without coupling. They start nearly sure to be open and learn
# faster than the rest; the budget is met after a third of the training, the rest of which is for the network to recover.
_base_ = 'resnet20_baseline_tuned_cifar10.py'
model = dict(backbone=dict(gate=dict(_delete_=True, type='BinConcreteGate', bias_init=3.)))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=4., decay_mult=0.)}))
custom_hooks = [
    dict(type='BudgetHook', target=0.45, reach=0.3),
    dict(type='GatedMACsHook'),
]
work_dir = 'work_dirs/short/resnet20_gated_tuned_cifar10'
