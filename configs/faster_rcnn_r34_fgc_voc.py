# faster_rcnn_r34_gated_voc.py and nothing but Feature-Gate Coupling: in the last stage and with one
# neighbor, as in the paper. Form, eta and start are not the paper's: _base_/gating.py says why.
_base_ = 'faster_rcnn_r34_gated_voc.py'
custom_hooks = _base_.custom_hooks + [dict(layers='last_stage', k=1, **_base_.fgc)]
