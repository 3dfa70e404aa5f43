# pspnet_r50_gated_tuned_camvid.py with Feature-Gate Coupling on the last stage.
_base_ = 'pspnet_r50_gated_tuned_camvid.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='FGCHook', layers='last_stage', k=4, eta=0.03, form='mean_log', log_interval=15),
]
work_dir = 'work_dirs/short/pspnet_r50_fgc_tuned_camvid'
