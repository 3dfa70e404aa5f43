# Static pruning without labels, the control of resnet20_gated_distilled_cifar10.py: channels are chosen by what the last maps change by
# without them, and the rest learns what the dense network computes.
_base_ = 'resnet20_static_tuned_cifar10.py'
custom_hooks = [
    dict(type='StaticPruningHook', criterion='features', target=0.45, batches=16),
    dict(type='DistillationHook', task=0),
    dict(type='GatedMACsHook'),
]
work_dir = 'work_dirs/short/resnet20_static_distilled_cifar10'
