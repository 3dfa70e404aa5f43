# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Gated networks through the doors of the ecosystem: the packages' own tools and config styles."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from fgc_mm.gates import find_gates

PROJECT = Path(__file__).parents[2]
DEMOS = {
    'mmdet': 'faster_rcnn_r18_digits_budget',
    'mmseg': 'pspnet_r18_digits_gated',
    'mmpretrain': 'resnet18_digits_budget_fgc',
}


@pytest.mark.parametrize('package', DEMOS)
def test_the_package_s_own_tool_trains(package, short_options, tmp_path):
    """With custom_imports in the config and nothing else."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    base = PROJECT / f'configs/demo/{DEMOS[package]}.py'
    cfg = Config.fromfile(base)
    cfg.custom_imports = dict(imports=['fgc_mm'])
    cfg.load_from = None
    for split in ('train', 'val', 'test'):  # mmpretrain's tool wants workers otherwise
        cfg[f'{split}_dataloader'].persistent_workers = False
    for hook in cfg.custom_hooks:
        if hook.type == 'FGCHook':
            hook.k = 2  # of four pictures
    config = tmp_path / 'mine.py'
    cfg.dump(config)
    options = [o for o in short_options(base) if not o.startswith('demo_data')]
    done = subprocess.run(
        [sys.executable, folder / '.mim/tools/train.py', config, '--work-dir', tmp_path, *options],
        env={**os.environ, 'PYTHONPATH': str(PROJECT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / 'epoch_1.pth').is_file()
    assert 'gate/openness' in done.stdout + done.stderr


def test_new_style_configs(tmp_path):
    """A base read by read_base, its backbone wrapped."""
    (tmp_path / 'dense.py').write_text(
        'from mmpretrain.models import GlobalAveragePooling, ImageClassifier\n'
        'from mmpretrain.models import LinearClsHead, ResNet\n'
        'model = dict(type=ImageClassifier, backbone=dict(type=ResNet, depth=18),\n'
        '    neck=dict(type=GlobalAveragePooling),\n'
        '    head=dict(type=LinearClsHead, num_classes=10, in_channels=512))\n'
        "default_scope = 'mmpretrain'\n"
    )
    (tmp_path / 'gated.py').write_text(
        'from mmengine.config import read_base\n'
        'from fgc_mm.nets import Gated\n'
        'from fgc_mm.training import BudgetHook\n'
        'with read_base():\n'
        '    from .dense import *\n'
        'model = dict(model, backbone=dict(type=Gated, backbone=model["backbone"]))\n'
        'custom_hooks = [dict(type=BudgetHook, target=0.5)]\n'
    )
    cfg = Config.fromfile(tmp_path / 'gated.py')
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    assert type(model.backbone).__name__ == 'ResNet'
    assert list(find_gates(model)) == [
        f'backbone.gates.layer{stage}-{block}-conv1' for stage in (1, 2, 3, 4) for block in (0, 1)
    ]
