# Stage 2 of 2, with Feature-Gate Coupling in the last stage.
# The paper does not tell which blocks it couples here; the last stage is our choice, as is the
# warm-up: 5 % of the training, as the authors have for ResNets.
_base_ = 'wrn28_10_gated_cifar10.py'
custom_hooks = _base_.custom_hooks + [
    dict(
        type='FGCHook',
        layers='last_stage',
        k=200,
        eta=0.003,  # belongs to this form
        form='log_sum',
        warmup_epochs=10)
]
