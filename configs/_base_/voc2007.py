# VOC 2007 trainval -> test, with the paper's schedule: 1x (12 epochs), lr 0.001.
_base_ = [
    'mmdet::_base_/datasets/voc0712.py',
    'mmdet::_base_/schedules/schedule_1x.py',
    'mmdet::_base_/default_runtime.py'
]
custom_imports = dict(imports=['fgc_mm'])
# Of mmdet's 3 x (2007 + 2012) only 2007, once.
train_dataloader = dict(
    dataset=dict(_delete_=True, **_base_.train_dataloader.dataset.dataset.datasets[0]))
optim_wrapper = dict(optimizer=dict(lr=0.001))
# The paper names no batch size; two pictures per step is our choice.
auto_scale_lr = dict(base_batch_size=2)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=2))
