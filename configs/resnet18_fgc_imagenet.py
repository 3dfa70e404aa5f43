# resnet18_gated_imagenet.py and nothing but Feature-Gate Coupling: in the last block and with 200 neighbors,
# as in the paper. Form, eta and start are not the paper's: _base_/gating.py says why. There are two banks
# of 2.4 GiB: bank_dtype='float16' or bank_storage='host' where that is too much.
_base_ = 'resnet18_gated_imagenet.py'
custom_hooks = _base_.custom_hooks + [dict(layers=[-1], k=200, **_base_.fgc)]
