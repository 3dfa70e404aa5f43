# The paper's schedule for CIFAR-100, and for WideResNet and MobileNetV2 on CIFAR-10: lr 0.1, x0.2
# at 60, 120 and 160 of 200 epochs.
_base_ = 'mmpretrain::_base_/schedules/cifar10_bs128.py'
optim_wrapper = dict(optimizer=dict(nesterov=True, weight_decay=5e-4))
param_scheduler = dict(milestones=[60, 120, 160], gamma=0.2)
train_cfg = dict(max_epochs=200, val_interval=10)
# For the gated configs. The ramp is our choice: half of the training, as in the 400 epochs.
rho = dict(start=0, end=100, value=0.4)
