# The paper's schedule for ResNets on CIFAR-10: lr 0.1, x0.1 at 200, 275 and 350 of 400 epochs.
_base_ = 'mmpretrain::_base_/schedules/cifar10_bs128.py'
optim_wrapper = dict(optimizer=dict(nesterov=True, weight_decay=5e-4))
param_scheduler = dict(milestones=[200, 275, 350])
train_cfg = dict(max_epochs=400, val_interval=10)
auto_scale_lr = dict(base_batch_size=256)
# For the gated configs: the ramp of the authors' code.
rho = dict(start=0, end=200, value=0.4)
