# Dense PSPNet, ResNet-50 with the plain stem, whose weights the classifiers of ImageNet have. The
# paper's 300 epochs at batch 6 and lr 0.02. Its crop is not told: 512 x 1024 is mmseg's.
_base_ = 'mmseg::pspnet/pspnet_r50b-d8_4xb2-80k_cityscapes-512x1024.py'
custom_imports = dict(imports=['fgc_mm'])
# Said where the other networks say it, so that one option names another file.
model = dict(
    pretrained=None,
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='torchvision://resnet50')))
max_iters = 300 * 496  # 2,975 pictures are 496 batches
# In one process; in three, set train_dataloader.batch_size=2.
train_dataloader = dict(batch_size=6, num_workers=6)
optim_wrapper = dict(optimizer=dict(lr=0.02))
param_scheduler = [
    dict(type='PolyLR', power=0.9, eta_min=0, begin=0, end=max_iters, by_epoch=False)
]
train_cfg = dict(max_iters=max_iters, val_interval=12400)
default_hooks = dict(checkpoint=dict(interval=12400, max_keep_ckpts=2))
auto_scale_lr = dict(base_batch_size=6)
