# Stage 1 of 2: MobileNetV2 learns conditional gates by batch shaping. The paper leaves the
# learning rate of this stage open; the constant 0.1 is our choice.
_base_ = ['mobilenet_v2_baseline_cifar10.py', '_base_/gating.py']
model = dict(backbone=dict(gate=dict(_delete_=True, **_base_.gate)))
optim_wrapper = dict(paramwise_cfg=_base_.no_decay)
param_scheduler = None
train_cfg = dict(max_epochs=_base_.bas_epochs)
custom_hooks = _base_.bas_hooks
work_dir = 'work_dirs/paper/mobilenet_v2_bas_cifar10'
