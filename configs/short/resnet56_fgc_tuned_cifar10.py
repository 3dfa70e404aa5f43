# resnet56_gated_tuned_cifar10.py with Feature-Gate Coupling on the last four blocks.
# Coupled from the third epoch on, when the budget is met: while it closes gates, rows of the bank are of more open ones and would
# pull them back.
_base_ = 'resnet56_gated_tuned_cifar10.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(
        type='FGCHook',
        layers=[-4, -3, -2, -1],
        k=200,
        eta=dict(start=2, end=3, value=0.03),
        form='mean_log'),
]
work_dir = 'work_dirs/short/resnet56_fgc_tuned_cifar10'
