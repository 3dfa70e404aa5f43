# resnet56_gated_tuned_cifar10.py with Feature-Gate Coupling on the last four blocks.
_base_ = 'resnet56_gated_tuned_cifar10.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='FGCHook', layers=[-4, -3, -2, -1], k=200, eta=0.03, form='mean_log'),
]
work_dir = 'work_dirs/short/resnet56_fgc_tuned_cifar10'
