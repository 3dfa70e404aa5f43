# resnet18_gated_imagenet.py with batch shaping (the paper's row BAS).
_base_ = 'resnet18_gated_imagenet.py'
custom_hooks = _base_.custom_hooks + [_base_.batch_shaping]
