# resnet18_digits_budget.py with Feature-Gate Coupling on the last stage: for tools/tradeoff.py.
_base_ = 'resnet18_digits_budget.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='FGCHook', layers='last_stage', k=20, eta=0.03, form='mean_log'),
]
