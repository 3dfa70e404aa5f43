# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""NaN on one of two ranks: both skip, both stop, and none waits for the other."""

import pytest
import torch
from two_processes import results_of_ranks, train_in_two_processes

SPOILER = """
import math, os
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from fgc_mm.runtime import FiniteHook, unwrap
from fgc_mm.training import FGCHook

@HOOKS.register_module()
class Spoiler(Hook):
    priority = 'VERY_LOW'

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 1 and get_rank() == 1:
            def hook(module, args, out):
                handle.remove()
                return out * math.nan
            model = unwrap(runner.model)
            handle = model.backbone.layer2[0].register_forward_hook(hook)

    def after_train(self, runner):
        hook = next(h for h in runner.hooks if isinstance(h, FGCHook))
        finite = next(h for h in runner.hooks if isinstance(h, FiniteHook))
        layers = hook.coupling.layers.values()
        banks = [b.data for c in layers for b in (c.feature_bank, c.gate_bank)]
        state = dict(weights=list(unwrap(runner.model).parameters()), banks=banks)
        state.update(seen=hook.coupling.seen, skipped=finite.skipped)
        torch.save(state, os.path.join(runner.work_dir, f'rank{get_rank()}.pth'))
"""


@pytest.mark.parametrize('action', ['skip', pytest.param('stop', marks=pytest.mark.slow)])
def test_all_ranks_do_the_same(action, digits_cfg, tmp_path):
    (tmp_path / 'spoiler.py').write_text(SPOILER)
    hooks = [dict(type='FGCHook', layers=[-1], k=5), dict(type='BudgetHook', target=0.5)]
    cfg = digits_cfg(
        [*hooks, dict(type='FiniteHook', action=action), dict(type='Spoiler')],
        max_epochs=1,
        custom_imports=dict(imports=['fgc_mm', 'spoiler']),
        **{'train_dataloader.batch_size': 8},
    )
    done = train_in_two_processes(cfg, tmp_path, timeout=120)
    said = done.stdout + done.stderr
    gate = 'backbone.gates.layer2-1-conv1'
    place = f'iteration 2{{}} rank 1: loss is NaN or Inf, and so are the logits of {gate}'
    if action == 'stop':
        assert done.returncode != 0 and 'error: ' + place.format(':') in said, said[-3000:]
        assert not list((tmp_path / 'run').glob('*.pth'))
        return
    ranks = results_of_ranks(done, tmp_path / 'run/rank{}.pth', weights_only=False)
    assert 'FiniteHook: ' + place.format(' is skipped:') in said
    for state in ranks:
        assert state['skipped'] == 1 and state['seen'] == 16 + 8  # of 40 pictures
        assert all(torch.isfinite(t).all() for t in (*state['weights'], *state['banks']))
    for key in ('weights', 'banks'):
        pairs = zip(ranks[0][key], ranks[1][key], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
