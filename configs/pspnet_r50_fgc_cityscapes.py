# pspnet_r50_gated_cityscapes.py and nothing but Feature-Gate Coupling: in the last stage and with four
# neighbors, as in the paper. Form, eta and start are not the paper's: _base_/gating.py says why.
_base_ = 'pspnet_r50_gated_cityscapes.py'
custom_hooks = _base_.custom_hooks + [dict(layers='last_stage', k=4, **_base_.fgc)]
