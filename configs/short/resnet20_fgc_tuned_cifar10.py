# resnet20_gated_tuned_cifar10.py with Feature-Gate Coupling on the last two blocks.
_base_ = 'resnet20_gated_tuned_cifar10.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='FGCHook', layers=[-2, -1], k=200, eta=0.03, form='mean_log'),
]
work_dir = 'work_dirs/short/resnet20_fgc_tuned_cifar10'
