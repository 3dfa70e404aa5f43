# resnet50_gated_imagenet.py with batch shaping (the paper's row BAS).
_base_ = 'resnet50_gated_imagenet.py'
custom_hooks = _base_.custom_hooks + [_base_.batch_shaping]
