# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""benchmarks/speed.py on a network as it is trained."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def times(demo_checkpoint, demo_root, tmp_path):
    """``times(change)``: kind -> figures of a network whose weights are changed."""
    checkpoint, config, out = tmp_path / 'gated.pth', tmp_path / 'few.py', tmp_path / 'speed.json'
    demo_checkpoint('resnet18_digits_gated', checkpoint)
    data = f"dict(indices=6, data_root='{demo_root}/classification/')"
    text = f"_base_ = '{PROJECT}/configs/demo/resnet18_digits_gated.py'\n"
    text += f"demo_data = dict(root='{demo_root}')\nwork_dir = '{tmp_path}/work'\n"
    config.write_text(text + f'test_dataloader = dict(dataset={data})\n')
    command = [sys.executable, PROJECT / 'benchmarks/speed.py', '--kinds', 'sparse', 'slim']
    command += ['--trained', config, checkpoint, '--pictures', 2, '--repeats', 1, '--warmup', 0]
    command += ['--threads', 1, '--out', out]

    def measure(change=None):
        if change is not None:
            content = torch.load(checkpoint, weights_only=False)
            change(content['state_dict'])
            torch.save(content, checkpoint)
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        figures = {row['kind']: row for row in json.loads(out.read_text())['rows']}
        assert list(figures) == ['dense', 'sparse', 'slim']
        return figures

    return measure


def test_slimmed_by_all_test_pictures(times):
    figures = times()
    # Channels that are closed anyway are left out: the same is executed, by smaller gates.
    assert figures['slim']['macs_ratio'] <= figures['sparse']['macs_ratio'] < 0.9
    assert figures['slim']['macs_ratio'] > figures['sparse']['macs_ratio'] - 0.05


def test_no_gates_are_left_where_all_is_open(times):
    def always_open(weights):
        for name, values in weights.items():
            if '.fc2.' in name:
                values.fill_(9 if name.endswith('bias') else 0)

    figures = times(always_open)
    assert figures['slim']['macs_ratio'] == 1 < figures['sparse']['macs_ratio']
