# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A budget in two processes, through tools/train.py."""

import torch
from two_processes import results_of_ranks, train_in_two_processes

# What every rank writes down, in a module the config imports.
RECORDER = """
import os
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from fgc_mm.runtime import unwrap
from fgc_mm.training import BudgetHook
from fgc_mm.gates import find_gates

@HOOKS.register_module()
class BudgetRecorder(Hook):
    priority = 'VERY_LOW'

    def before_train(self, runner):
        self.steps = []
        self.hook = next(h for h in runner.hooks if isinstance(h, BudgetHook))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        gates = find_gates(unwrap(runner.model)).values()
        hard = [(g.record.probs > 0.5).float().mean() for g in gates]
        self.steps.append(dict(
            state=self.hook.budget.controller.state_dict(),
            bias=[g.fc2.bias.detach().clone() for g in gates],
            openness=torch.stack(hard),
        ))

    def after_train(self, runner):
        torch.save(self.steps, os.path.join(runner.work_dir, f'rank{get_rank()}.pth'))
"""


def test_the_same_on_all_ranks(digits_cfg, tmp_path):
    (tmp_path / 'budget_recorder.py').write_text(RECORDER)
    hook = dict(type='BudgetHook', target=0.5, check_interval=2)
    gate = dict(type='BinConcreteGate', bias_init=0.1)
    cfg = digits_cfg(
        [hook, dict(type='BudgetRecorder')],
        max_epochs=1,
        custom_imports=dict(imports=['fgc_mm', 'budget_recorder']),
        **{'train_dataloader.batch_size': 8, 'model.backbone.gate': gate},
    )
    done = train_in_two_processes(cfg, tmp_path)
    ranks = results_of_ranks(done, tmp_path / 'run/rank{}.pth')
    assert len(ranks[0]) == len(ranks[1]) == 3
    first, second = ranks[0][0], ranks[1][0]
    # The ranks saw different pictures, and both know what both saw.
    assert not torch.equal(first['openness'], second['openness'])
    joint = (first['openness'] + second['openness']) / 2
    torch.testing.assert_close(torch.tensor(first['state']['openness']), joint)
    for one, other in zip(*ranks, strict=True):
        assert one['state'] == other['state']
        for a, b in zip(one['bias'], other['bias'], strict=True):
            assert torch.equal(a, b)
