# pspnet_r50_gated_tuned_camvid.py with Feature-Gate Coupling on the last stage.
# Coupled from the middle on, when the budget is met: while it closes gates, rows of the bank are of more open ones and would
# pull them back.
_base_ = 'pspnet_r50_gated_tuned_camvid.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(
        type='FGCHook',
        layers='last_stage',
        k=4,
        eta=dict(start=2.5, end=3.5, value=0.03),
        form='mean_log',
        log_interval=15),
]
work_dir = 'work_dirs/short/pspnet_r50_fgc_tuned_camvid'
