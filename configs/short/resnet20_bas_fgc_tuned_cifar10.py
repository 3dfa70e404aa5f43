# resnet20_bas_tuned_cifar10.py with Feature-Gate Coupling: batch shaping makes most channels depend on the picture, which
# leaves the coupling more to do.
_base_ = 'resnet20_fgc_tuned_cifar10.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='BatchShapingHook', zeta=dict(start=0, end=4, begin=0.02, value=0)),
]
work_dir = 'work_dirs/short/resnet20_bas_fgc_tuned_cifar10'
