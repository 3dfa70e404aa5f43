# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""`fgc train` with a budget."""

from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[2]
CONFIG = 'configs/demo/resnet18_digits_gated.py'


@pytest.mark.parametrize('name', ['faster_rcnn_r18', 'pspnet_r18', 'resnet18'])
def test_the_budget_demos_train(name, run_tool, short_options, tmp_path):
    config = f'configs/demo/{name}_digits_budget.py'
    more = ['load_from=None', 'train_cfg.max_epochs=2', 'train_cfg.val_interval=1']
    options = short_options(config, *more)
    code, _, err = run_tool('train', config, '--work-dir', tmp_path, *options)
    assert code == 0, err
    state = torch.load(tmp_path / 'epoch_2.pth', weights_only=False)['budget']
    # Two steps, a validation at half of the training, where the target is reached, two steps.
    assert state['seen'] == 4 and state['validations'] == 1
    assert state['start'] > 0.6


@pytest.mark.parametrize(
    ('hooks', 'base', 'message'),
    [
        ("dict(type='BudgetHook', target=0.001)", CONFIG, 'target=0.001 cannot be reached'),
        ("dict(type='BudgetHook', target=1.5)", CONFIG, 'target=1.5 must be within (0, 1]'),
        ("dict(type='BudgetHook', target=0.5), dict(type='L0Hook')", CONFIG, 'keep one of them'),
        ("dict(type='BudgetHook', target=0.5)", 'configs/demo/resnet18_digits.py', 'has no gates'),
    ],
)
def test_a_budget_that_cannot_be_is_one_message(
    hooks, base, message, run_tool, short_options, tmp_path
):
    config = tmp_path / 'budget.py'
    config.write_text(f"_base_ = '{PROJECT / base}'\ncustom_hooks = [{hooks}]\n")
    options = short_options(base)
    code, _, err = run_tool('train', config, '--work-dir', tmp_path, *options)
    assert code == 2
    assert 'BudgetHook: ' in err and message in err
    assert 'Traceback' not in err
    assert not list(tmp_path.glob('*.pth'))
