# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The command line of the converter."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from fgc_mm.nets import GatedResNetCifar

ROOT = Path(__file__).parents[2]


def run(*args):
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    return subprocess.run(
        [sys.executable, str(ROOT / 'tools' / 'convert_weights.py'), *map(str, args)],
        env={**os.environ, 'PYTHONPATH': path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_dense_weights_become_a_classifier(tmp_path):
    from mmpretrain.registry import MODELS

    torch.manual_seed(0)
    source = GatedResNetCifar(20, gate=None)
    weights = {f'module.{key}': value for key, value in source.state_dict().items()}
    weights['module.linear.weight'] = torch.randn(10, 64)
    weights['module.linear.bias'] = torch.randn(10)
    torch.save(dict(state_dict=weights), tmp_path / 'src.th')
    result = run(tmp_path / 'src.th', tmp_path / 'dst.pth')
    assert result.returncode == 0, result.stderr
    assert 'dense_cifar: 116 tensors' in result.stdout and '10 classes' in result.stdout

    model = MODELS.build(
        dict(
            type='ImageClassifier',
            backbone=dict(type='GatedResNetCifar', depth=20),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=10, in_channels=64),
        )
    )
    checkpoint = torch.load(tmp_path / 'dst.pth', weights_only=True)
    keys = model.load_state_dict(checkpoint['state_dict'], strict=False)
    assert not keys.unexpected_keys
    assert keys.missing_keys and all('.gates.' in key for key in keys.missing_keys)
    assert torch.equal(model.head.fc.weight, weights['module.linear.weight'])
    assert torch.equal(model.backbone.layer3[2].conv2.weight, source.layer3[2].conv2.weight)


def test_what_is_not_understood_is_an_error_without_a_traceback(tmp_path):
    torch.save(dict(weight=torch.zeros(2)), tmp_path / 'src.pth')
    result = run(tmp_path / 'src.pth', tmp_path / 'dst.pth')
    assert result.returncode == 2
    assert 'None of the known formats fits the 1 keys' in result.stderr
    assert 'Traceback' not in result.stderr
    assert not (tmp_path / 'dst.pth').exists()
