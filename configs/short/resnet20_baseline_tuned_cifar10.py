# Dense ResNet-20, fine-tuned from public weights for six epochs: what the rows with gates are compared with, and what they
# inherit. Half of the channels cannot be given up in a few steps, so batches are small and the rate is high.
_base_ = '../_base_/resnet20_cifar_short.py'
train_dataloader = dict(batch_size=64)
optim_wrapper = dict(optimizer=dict(lr=0.05))
auto_scale_lr = dict(base_batch_size=64)
# On pictures it was not trained on a network opens other gates: where a budget is to be met, it looks at some of them.
train_cfg = dict(val_interval=1)
val_dataloader = dict(dataset=dict(indices=2000))
work_dir = 'work_dirs/short/resnet20_baseline_tuned_cifar10'
