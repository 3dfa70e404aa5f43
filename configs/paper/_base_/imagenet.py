# ImageNet as in configs/, and the ramp of the sparsity loss: half of the training, as on CIFAR-10 (our choice).
_base_ = '../../_base_/imagenet.py'
rho = dict(start=0, end=65, value=0.4)
