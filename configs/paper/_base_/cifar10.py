# CIFAR-10 from its official binary files (docs/data.md has the pickled ones), and the runtime.
_base_ = [
    'mmpretrain::_base_/datasets/cifar10_bs16.py',
    'mmpretrain::_base_/default_runtime.py'
]
custom_imports = dict(imports=['fgc_mm'])
train_dataloader = dict(batch_size=256, dataset=dict(type='CIFARBinary'))
val_dataloader = dict(batch_size=256, dataset=dict(type='CIFARBinary'))
test_dataloader = val_dataloader
val_evaluator = dict(topk=(1, 5))
test_evaluator = val_evaluator
default_hooks = dict(checkpoint=dict(interval=10, max_keep_ckpts=2))
