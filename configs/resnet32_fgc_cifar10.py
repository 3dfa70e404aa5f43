# Stage 2 of 2, with Feature-Gate Coupling in the last two blocks.
_base_ = 'resnet32_gated_cifar10.py'
custom_hooks = _base_.custom_hooks + [
    dict(
        type='FGCHook',
        layers=[-2, -1],
        k=200,
        eta=0.003,  # belongs to this form
        form='log_sum',
        warmup_epochs=20)
]
