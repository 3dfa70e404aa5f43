# The network of faster_rcnn_r50_fgc_voc.py, whose gates are still open, brought down to 70 % of its backbone's
# multiplications in one more epoch.
_base_ = 'faster_rcnn_r50_fgc_voc.py'
load_from = 'work_dirs/short/faster_rcnn_r50_fgc_voc/epoch_5.pth'
train_cfg = dict(max_epochs=1, val_interval=1)
optim_wrapper = dict(optimizer=dict(lr=0.001))
param_scheduler = None
custom_hooks = [
    dict(type='BudgetHook', target=0.7),
    dict(layers='last_stage', k=1, **_base_.finetuned_fgc),
    dict(type='GatedMACsHook'),
]
work_dir = 'work_dirs/short/faster_rcnn_r50_fgc_budget_voc'
