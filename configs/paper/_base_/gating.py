# Pieces that the paper's gated configs take by name (`_base_.gate`, ...); nothing here acts by itself.

# Batch norm inside the gates and no weight decay on them, as in the authors' code.
gate = dict(type='BinConcreteGate', norm_cfg=dict(type='BN1d'))
# For gates that come from ImageNet and are fine-tuned on a few pictures per step: their batch norm
# keeps the statistics it came with, as the backbone's does in detection. (Our choice; the paper
# says nothing.)
finetuned_gate = dict(type='BinConcreteGate', norm_cfg=dict(type='BN1d'), norm_eval=True)
no_decay = dict(custom_keys={'gate': dict(decay_mult=0.)})

# Stage 1, `bas`: batch shaping fades out over 100 epochs, no sparsity loss.
bas_hooks = [
    dict(
        type='BatchShapingHook',
        zeta=dict(start=0, end=100, begin=0.75, value=0),
        gather='ranks'),
    dict(type='GatedMACsHook'),
]
bas_epochs = 100

# Coupling as in the authors' code; eta belongs to this form. Layers and warm-up are the config's.
fgc = dict(type='FGCHook', k=200, eta=0.003, form='log_sum')
finetuned_fgc = dict(type='FGCHook', eta=1e-4, form='log_sum')
