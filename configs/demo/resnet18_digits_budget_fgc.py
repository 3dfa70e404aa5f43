# resnet18_digits_budget.py with Feature-Gate Coupling on the last stage: for experiments/tradeoff.py.
# Coupled from the third epoch on, when the budget is met: while it closes gates, rows of the bank are of more open ones and would
# pull them back.
_base_ = 'resnet18_digits_budget.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(
        type='FGCHook',
        layers='last_stage',
        k=20,
        eta=dict(start=2, end=3, value=0.03),
        form='mean_log'),
]
