# The dense segmentor of pspnet_r50_baseline_camvid.py, trained on for five epochs at a lower rate: what the rows with gates
# are compared with, and what they inherit.
_base_ = 'pspnet_r50_baseline_camvid.py'
load_from = 'work_dirs/short/pspnet_r50_baseline_camvid/epoch_10.pth'
model = dict(backbone=dict(init_cfg=None))
max_epochs = 5
train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
optim_wrapper = dict(optimizer=dict(lr=0.002))
param_scheduler = [
    dict(type='PolyLR', power=0.9, end=max_epochs, by_epoch=True, convert_to_iter_based=True)
]
work_dir = 'work_dirs/short/pspnet_r50_baseline_tuned_camvid'
