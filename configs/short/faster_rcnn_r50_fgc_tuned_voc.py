# faster_rcnn_r50_gated_tuned_voc.py with Feature-Gate Coupling on the last stage.
_base_ = 'faster_rcnn_r50_gated_tuned_voc.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='FGCHook', layers='last_stage', k=1, eta=0.03, form='mean_log', log_interval=20),
]
work_dir = 'work_dirs/short/faster_rcnn_r50_fgc_tuned_voc'
