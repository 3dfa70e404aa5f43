# resnet20_gated_tuned_cifar10.py with batch shaping, which fades out over four of the six epochs: the row BAS. The weight
# 0.02 is that of resnet20_gated_cifar10.py; the 0.75 of long trainings would outweigh everything else.
_base_ = 'resnet20_gated_tuned_cifar10.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='BatchShapingHook', zeta=dict(start=0, end=4, begin=0.02, value=0)),
]
work_dir = 'work_dirs/short/resnet20_bas_tuned_cifar10'
