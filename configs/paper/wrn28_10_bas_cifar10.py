# Stage 1 of 2: WideResNet-28-10 learns conditional gates by batch shaping. The paper leaves the
# learning rate of this stage open; the constant 0.1 is our choice.
_base_ = ['wrn28_10_baseline_cifar10.py', '_base_/gating.py']
model = dict(backbone=dict(gate=dict(_delete_=True, **_base_.gate)))
optim_wrapper = dict(paramwise_cfg=_base_.no_decay)
param_scheduler = None
train_cfg = dict(max_epochs=_base_.bas_epochs)
custom_hooks = _base_.bas_hooks
work_dir = 'work_dirs/paper/wrn28_10_bas_cifar10'
