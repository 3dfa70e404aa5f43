# The network of faster_rcnn_r50_fgc_voc.py, whose gates are still open, brought down to 70 % of its backbone's
# multiplications in two more epochs.
_base_ = 'faster_rcnn_r50_fgc_voc.py'
load_from = 'work_dirs/short/faster_rcnn_r50_fgc_voc/epoch_5.pth'
train_cfg = dict(max_epochs=2, val_interval=2)
param_scheduler = [dict(type='MultiStepLR', begin=0, end=2, by_epoch=True, milestones=[1], gamma=0.1)]
custom_hooks = [
    dict(type='BudgetHook', target=0.7),
    dict(layers='last_stage', k=1, warmup_epochs=1, **_base_.finetuned_fgc),
    dict(type='GatedMACsHook'),
]
work_dir = 'work_dirs/short/faster_rcnn_r50_fgc_budget_voc'
