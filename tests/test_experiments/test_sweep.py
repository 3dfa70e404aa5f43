# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""experiments/sweep.py: what it would do, and two real points of two steps."""

import csv
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path):
    """The gated demo classifier with coupling."""
    path = tmp_path / 'resnet18_digits_fgc.py'
    hooks = [
        dict(type='L0Hook', rho=dict(start=0, end=10, value=0.4)),
        dict(type='FGCHook', layers=-1, k=2),
        dict(type='GatedMACsHook'),
    ]
    base = ROOT / 'configs/demo/resnet18_digits_gated.py'
    path.write_text(f"_base_ = '{base}'\ncustom_hooks = {hooks!r}\n")
    return path


def test_dry_run_prints_commands_and_writes_nothing(config, run_tool, tmp_path):
    work = tmp_path / 'work'
    args = [config, '--ablation', 'source', '--seeds', '0', '1', '--work-dir', work, '--dry-run']
    code, out, err = run_tool('sweep', *args, '--cfg-options', 'train_cfg.max_epochs=1')
    assert code == 0, err
    lines = out.strip().splitlines()
    assert len(lines) == 5 * 2 * 3
    folder = work / 'feature_shared' / 'seed1'
    (train,) = [line for line in lines if 'train.py' in line and str(folder) in line]
    assert train.endswith('--cfg-options randomness.seed=1 train_cfg.max_epochs=1')
    (test,) = [line for line in lines if 'test.py' in line and str(folder) in line]
    assert f'--out {folder}/figures.json' in test
    assert not work.exists()


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['--set', 'FGCHook.kk', '1'], "FGCHook has no field 'kk'"),
        (['--set', 'BudgetHok.target', '1'], 'must have one BudgetHok, it has 0'),
        (['--ablation', 'k', '--report'], 'no run has its figures.json yet'),
    ],
)
def test_mistakes_are_one_message(args, message, config, run_tool, tmp_path):
    code, _, err = run_tool('sweep', config, *args, '--work-dir', tmp_path / 'work')
    assert code == 2
    assert message in err and 'Traceback' not in err
    code, _, err = run_tool('sweep', 'nowhere.py', '--ablation', 'k')
    assert code == 2 and 'nowhere.py does not exist' in err


def test_two_points_for_real(config, run_tool, short_options, tmp_path, monkeypatch):
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]))
    work = tmp_path / 'work'
    args = [config, '--set', 'k', '1', '2', '--seeds', '4', '--work-dir', work]
    args += short_options(config, 'test_evaluator.topk=1')
    code, out, err = run_tool('sweep', *args)
    assert code == 0, out + err
    log = (work / 'k=1' / 'seed4' / 'train.log').read_text()
    assert 'loss_fgc' in log and 'seed: 4' in log
    with open(work / 'table.csv') as file:
        rows = list(csv.DictReader(file))
    assert [row['setting'] for row in rows] == ['k=1', 'k=2']
    assert all(0 <= float(row['error/top1_mean']) <= 100 for row in rows)
    assert all((work / name).is_file() for name in ('sweep.png', 'sweep.svg', 'table.md'))

    # Nothing is left to do, nor is anything done.
    checkpoint = work / 'k=2' / 'seed4' / 'epoch_1.pth'
    before = checkpoint.stat().st_mtime_ns
    code, again, err = run_tool('sweep', *args)
    assert code == 0, err
    assert checkpoint.stat().st_mtime_ns == before
    assert again[again.index('| setting') :] == out[out.index('| setting') :]
    # Other options are another sweep.
    code, _, err = run_tool('sweep', *args, 'train_cfg.max_epochs=2')
    assert code == 2 and 'holds a run with other settings' in err


def test_a_run_that_fails_is_reported(config, run_tool, short_options, tmp_path, monkeypatch):
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]))
    args = [config, '--set', 'k', '1', '--seeds', '0', '--work-dir', tmp_path / 'work']
    options = short_options(config, 'model.backbone.type=NoSuchNet')
    code, out, _ = run_tool('sweep', *args, *options)
    assert code == 2
    assert 'failed with code 2' in out and 'NoSuchNet' in out
