# faster_rcnn_r50_gated_tuned_voc.py with Feature-Gate Coupling on the last stage.
# Coupled from the second epoch on, when the budget is met: while it closes gates, rows of the bank are of more open ones and would
# pull them back.
_base_ = 'faster_rcnn_r50_gated_tuned_voc.py'
custom_hooks = [
    *_base_.custom_hooks,
    dict(
        type='FGCHook',
        layers='last_stage',
        k=1,
        eta=dict(start=1, end=1.5, value=0.03),
        form='mean_log',
        log_interval=20),
]
work_dir = 'work_dirs/short/faster_rcnn_r50_fgc_tuned_voc'
