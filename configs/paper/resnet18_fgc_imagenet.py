# Stage 2 of 2, with Feature-Gate Coupling in the last block.
# Each bank takes 2.4 GiB and there are two:
# bank_dtype='float16' or bank_storage='host' where that is too much. The warm-up is our choice:
# 5 % of the training, as on CIFAR-10.
_base_ = 'resnet18_gated_imagenet.py'
custom_hooks = _base_.custom_hooks + [
    dict(layers=[-1], warmup_epochs=6, **_base_.fgc)
]
work_dir = 'work_dirs/paper/resnet18_fgc_imagenet'
