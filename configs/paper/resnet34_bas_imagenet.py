# Stage 1 of 2: ResNet-34 learns conditional gates by batch shaping. The paper leaves the
# learning rate of this stage open; the constant 0.1 is our choice.
_base_ = ['resnet34_baseline_imagenet.py', '_base_/gating.py']
model = dict(backbone=dict(type='GatedResNet', gate=_base_.gate))
optim_wrapper = dict(paramwise_cfg=_base_.no_decay)
param_scheduler = None
train_cfg = dict(max_epochs=_base_.bas_epochs)
custom_hooks = _base_.bas_hooks
work_dir = 'work_dirs/paper/resnet34_bas_imagenet'
