# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""benchmarks/deploy.py on a tiny network: what it measures, keeps and leaves out."""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / 'benchmarks'


@pytest.fixture
def deploy(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import deploy

    tiny = dict(type='mmdet.ResNet', depth=18, base_channels=8)
    monkeypatch.setitem(deploy.NETWORKS, 'resnet18', tiny)
    threads = torch.get_num_threads()
    yield deploy
    torch.set_num_threads(threads)


def test_measures_once_and_goes_on(deploy, tmp_path, monkeypatch, capsys):
    out = tmp_path / 'deploy.json'
    monkeypatch.setitem(sys.modules, 'openvino', None)
    options = ['--networks', 'resnet18', '--open', '0.5', '--repeats', '1', '--threads', '1']
    engines = ['--engines', 'pytorch', 'onnxruntime', 'openvino', 'ours']
    deploy.main([*options, '--sizes', '64', '--out', str(out), *engines])
    text = capsys.readouterr().out
    assert '# resnet18 64: left out: openvino: ' in text
    rows = json.loads(out.read_text())['settings']['resnet18 64']
    assert [(row['engine'], row['channels'], row['precision']) for row in rows] == [
        *(('pytorch', channels, kind) for kind in ('f32', 'bf16') for channels in CHANNELS),
        *(('onnxruntime', channels, kind) for kind in ('f32', 'int8') for channels in CHANNELS),
        ('ours', '50 % open', 'f32'),
        ('ours', '50 % open', 'bf16'),
    ]
    for row in rows:
        assert 0 < row['fastest_ms'] <= row['ms']
        assert row['difference'] < (1e-3 if row['precision'] == 'f32' else 0.2), row
    assert '| onnxruntime | 50 % static | int8 |' in text
    # What is there is not measured again.
    monkeypatch.setattr(deploy, 'measure', None)
    deploy.main([*options, '--sizes', '64', '--out', str(out), *engines])
    assert capsys.readouterr().out.count('| pytorch |') == 4


CHANNELS = ('all', '50 % static')


@pytest.mark.parametrize(
    ('options', 'message'),
    {
        '--open 1.5': 'shares must be within (0, 1)',
        '--repeats 0': '--repeats 0 must be at least 1',
        '--report': 'name a file that is there by --out',
    }.items(),
)
def test_mistakes(deploy, options, message, capsys):
    with pytest.raises(SystemExit):
        deploy.parse_args(options.split())
    assert message in capsys.readouterr().err
