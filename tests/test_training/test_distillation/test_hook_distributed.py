# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Distillation in two processes, through tools/train.py."""

import torch
from two_processes import results_of_ranks, train_in_two_processes

RECORDER = """
import os
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from fgc_mm.runtime import unwrap
from fgc_mm.training import DistillationHook

@HOOKS.register_module()
class TeacherRecorder(Hook):
    def after_train(self, runner):
        hook = next(h for h in runner.hooks if isinstance(h, DistillationHook))
        state = dict(token=hook.distillation.token, model=unwrap(runner.model).state_dict())
        torch.save(state, os.path.join(runner.work_dir, f'rank{get_rank()}.pth'))
"""


def test_one_teacher_and_one_network(digits_cfg, tmp_path):
    (tmp_path / 'teacher_recorder.py').write_text(RECORDER)
    hooks = [
        dict(type='DistillationHook', task=0),
        dict(type='BudgetHook', target=0.5, check_interval=2),
        dict(type='TeacherRecorder'),
    ]
    cfg = digits_cfg(
        hooks,
        max_epochs=1,
        custom_imports=dict(imports=['fgc_mm', 'teacher_recorder']),
        **{'train_dataloader.batch_size': 8},
    )
    done = train_in_two_processes(cfg, tmp_path)
    assert done.returncode and 'set find_unused_parameters=True' in done.stderr
    cfg.find_unused_parameters = True
    done = train_in_two_processes(cfg, tmp_path, work_dir='again')
    one, other = results_of_ranks(done, tmp_path / 'again/rank{}.pth')
    assert one['token'] == other['token']
    names = [name for name in one['model'] if 'running' not in name and 'tracked' not in name]
    assert all(torch.equal(one['model'][name], other['model'][name]) for name in names)
