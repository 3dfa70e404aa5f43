# Static pruning at the same cost, the control of the rows whose channels depend on the picture: what the loss misses least is
# closed before the first step, for all pictures, and the whole training is for the network to recover.
_base_ = 'resnet20_baseline_tuned_cifar10.py'
model = dict(backbone=dict(gate=dict(_delete_=True, type='StaticGate')))
custom_hooks = [
    dict(type='StaticPruningHook', criterion='taylor', target=0.45, batches=16),
    dict(type='GatedMACsHook'),
]
work_dir = 'work_dirs/short/resnet20_static_tuned_cifar10'
