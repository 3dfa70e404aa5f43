# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The demo trainings against the figures the README promises (minutes each)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
# name -> figure, factor to percent, what the dense network must reach
DEMOS = {
    'faster_rcnn_r18_digits': ('pascal_voc/mAP', 100, 80),
    'pspnet_r18_digits': ('mIoU', 1, 60),
    'resnet18_digits': ('accuracy/top1', 1, 97),
}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Train and test a demo config once; its metrics."""
    done, checkpoints = {}, {}

    def metrics(name):
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            config = f'configs/demo/{name}.py'
            run = [sys.executable, 'tools/train.py', config, '--work-dir', folder]
            if name.endswith('_budget') or name == 'pspnet_r18_digits_gated':
                # It starts from its dense twin.
                dense = name.rpartition('_')[0]
                metrics(dense)
                run += ['--cfg-options', f'load_from={checkpoints[dense]}']
            subprocess.run(run, cwd=PROJECT, check=True)
            checkpoint = (folder / 'last_checkpoint').read_text().strip()
            run = [sys.executable, 'tools/test.py', config, checkpoint, '--work-dir', folder]
            subprocess.run([*run, '--out', folder / 'figures.json'], cwd=PROJECT, check=True)
            done[name] = json.loads((folder / 'figures.json').read_text())['metrics']
            checkpoints[name] = checkpoint
        return done[name]

    return metrics


@pytest.mark.slow
@pytest.mark.parametrize('name', DEMOS)
def test_the_dense_demo_learns(name, trained):
    key, percent, at_least = DEMOS[name]
    assert trained(name)[key] * percent >= at_least


@pytest.mark.slow
@pytest.mark.parametrize('name', DEMOS)
def test_the_gated_demo_keeps_up_and_saves(name, trained):
    key, percent, _ = DEMOS[name]
    dense, gated = trained(name), trained(f'{name}_gated')
    assert gated[key] * percent >= dense[key] * percent - 3
    assert gated['gates/closed'] >= 0.3
    # else it would be static pruning
    assert gated['gates/dynamic'] >= 0.2
    assert gated['macs/pruning_ratio'] > 0


@pytest.mark.slow
@pytest.mark.parametrize('name', DEMOS)
def test_the_budget_demo_ends_at_its_budget(name, trained):
    assert trained(f'{name}_budget')['macs/pruning_ratio'] == pytest.approx(50, abs=2)
