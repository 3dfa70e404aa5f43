# Stage 2 of 2, with Feature-Gate Coupling in the last two blocks.
_base_ = 'resnet32_gated_cifar10.py'
custom_hooks = _base_.custom_hooks + [
    dict(layers=[-2, -1], warmup_epochs=20, **_base_.fgc)
]
work_dir = 'work_dirs/paper/resnet32_fgc_cifar10'
