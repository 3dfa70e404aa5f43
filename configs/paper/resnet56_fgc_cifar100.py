# Stage 2 of 2, with Feature-Gate Coupling in the last four blocks.
# The warm-up is our choice: 5 % of the training, as the authors have on CIFAR-10.
_base_ = 'resnet56_gated_cifar100.py'
custom_hooks = _base_.custom_hooks + [
    dict(layers=[-4, -3, -2, -1], warmup_epochs=10, **_base_.fgc)
]
work_dir = 'work_dirs/paper/resnet56_fgc_cifar100'
