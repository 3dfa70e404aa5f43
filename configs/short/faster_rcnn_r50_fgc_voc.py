# configs/faster_rcnn_r50_fgc_voc.py in five epochs on small pictures. The optimizer, pictures and weights are those of
# faster_rcnn_r50_baseline_voc.py beside it; gates, budget and coupling are the whole one's.
_base_ = ['../faster_rcnn_r50_fgc_voc.py', '../_base_/voc2007_short.py']
model = dict(
    train_cfg=_base_.short_rcnn,
    data_preprocessor=_base_.short_preprocessor,
    backbone=dict(
        init_cfg=dict(checkpoint=_base_.short_weights), **_base_.short_backbone))
train_dataloader = dict(dataset=dict(pipeline=_base_.short_pipelines.train, indices=200))
val_dataloader = dict(dataset=dict(pipeline=_base_.short_pipelines.test, indices=100))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=5, val_interval=5)
# The usual 0.02 for 16 pictures: the paper's 0.001 is for longer trainings.
optim_wrapper = dict(
    optimizer=dict(lr=0.0025), paramwise_cfg=dict(custom_keys={'gate': dict(lr_mult=10.)}))
param_scheduler = _base_.short_schedule
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(max_keep_ckpts=1))
randomness = dict(seed=0)
work_dir = 'work_dirs/short/faster_rcnn_r50_fgc_voc'
