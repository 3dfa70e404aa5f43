# Gates at the cost of the paper's segmentor (35 % of the backbone saved), without coupling. Four pictures a step are
# no batch to normalize over, so the gates have layer norm.
_base_ = 'pspnet_r50_baseline_tuned_camvid.py'
model = dict(
    backbone=dict(
        type='GatedResNet',
        gate=dict(type='BinConcreteGate', norm_cfg=dict(type='LN'), bias_init=3.)))
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=10., decay_mult=0.)}))
custom_hooks = [
    dict(type='BudgetHook', target=0.65, reach=0.5),
    dict(type='GatedMACsHook'),
]
work_dir = 'work_dirs/short/pspnet_r50_gated_tuned_camvid'
