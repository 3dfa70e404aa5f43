# Pieces that the gated configs take by name (`_base_.gate`, ...); nothing here acts by itself.

# Layer norm: a few pictures per step are no batch to normalize over.
gate = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'))
classifier_gate = dict(type='BinConcreteGate', norm_cfg=dict(type='BN1d'))

# Coupling starts when the budget is met. Before, the banks hold gates that were more open and pull them back.
# eta belongs to this form; both are from the project's own runs (docs/results.md).
fgc = dict(type='FGCHook', form='mean_log', eta=dict(start='budget', value=0.03))

# Batch shaping fades out until the budget is met. The paper's 0.75 is for gates that start from nothing.
batch_shaping = dict(
    type='BatchShapingHook',
    zeta=dict(start=0, end='budget', begin=0.02, value=0),
    gather='ranks')
