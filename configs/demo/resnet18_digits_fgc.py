# resnet18_digits_gated.py with Feature-Gate Coupling on the last stage.
_base_ = 'resnet18_digits_gated.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='FGCHook', layers='last_stage', k=20, eta=0.03, form='mean_log'),
]
