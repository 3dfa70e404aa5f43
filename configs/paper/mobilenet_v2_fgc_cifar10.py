# Stage 2 of 2, with Feature-Gate Coupling in the last stage.
# The paper does not tell which blocks it couples here; the last stage is our choice, as is the
# warm-up: 5 % of the training, as the authors have for ResNets.
_base_ = 'mobilenet_v2_gated_cifar10.py'
custom_hooks = _base_.custom_hooks + [
    dict(layers='last_stage', warmup_epochs=10, **_base_.fgc)
]
work_dir = 'work_dirs/paper/mobilenet_v2_fgc_cifar10'
