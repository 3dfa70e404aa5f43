# The dense detector of faster_rcnn_r50_baseline_voc.py, trained on for two epochs at a lower rate: what the rows with gates
# are compared with, and what they inherit.
_base_ = 'faster_rcnn_r50_baseline_voc.py'
load_from = 'work_dirs/short/faster_rcnn_r50_baseline_voc/epoch_5.pth'
model = dict(backbone=dict(init_cfg=None))
train_cfg = dict(max_epochs=2, val_interval=2)
optim_wrapper = dict(optimizer=dict(lr=0.001))
param_scheduler = [
    dict(type='CosineAnnealingLR', T_max=2, by_epoch=True, convert_to_iter_based=True)
]
work_dir = 'work_dirs/short/faster_rcnn_r50_baseline_tuned_voc'
