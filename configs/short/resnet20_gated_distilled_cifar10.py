# resnet20_gated_tuned_cifar10.py without labels: the gated network learns to compute what the dense one does, and nothing else.
_base_ = 'resnet20_gated_tuned_cifar10.py'
custom_hooks = [
    dict(type='BudgetHook', target=0.45, reach=0.3),
    dict(type='DistillationHook', task=0),
    dict(type='GatedMACsHook'),
]
work_dir = 'work_dirs/short/resnet20_gated_distilled_cifar10'
