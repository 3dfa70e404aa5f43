# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""tools/train.py and tools/test.py on the demo configs, shrunk to a few steps."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[2]

DEMOS = {
    'faster_rcnn_r18_digits': ['pascal_voc/mAP'],
    'pspnet_r18_digits': ['mIoU', 'pixel_accuracy'],
    'resnet18_digits': ['accuracy/top1', 'error/top1', 'error/top5'],
}
COUNTED = [
    f'macs/{part}_{kind}_G' for part in ('backbone', 'model') for kind in ('executed', 'dense')
]


@pytest.mark.parametrize('name', DEMOS)
def test_train_resume_and_test(name, run_tool, short_options, tmp_path):
    config = f'configs/demo/{name}.py'
    options = short_options(config)
    code, _, err = run_tool('train', config, '--work-dir', tmp_path, '--auto-scale-lr', *options)
    assert code == 0, err
    assert (tmp_path / 'epoch_1.pth').is_file()

    more = short_options(config, 'train_cfg.max_epochs=2')
    code, out, err = run_tool('train', config, '--work-dir', tmp_path, '--resume', *more)
    assert code == 0, err
    assert 'resumed epoch: 1' in out + err
    checkpoint = tmp_path / 'epoch_2.pth'
    assert checkpoint.is_file()

    figures = tmp_path / 'figures.json'
    pictures = tmp_path / 'pictures'
    args = [config, checkpoint, '--work-dir', tmp_path, '--out', figures, '--show-dir', pictures]
    code, out, err = run_tool('test', *args, *options)
    assert code == 0, err
    written = json.loads(figures.read_text())
    summary = out[out.index('Results') :]
    for key in [*DEMOS[name], *COUNTED, 'macs/pruning_ratio']:
        assert key in written['metrics'] and key in summary
    assert written['metrics']['macs/pruning_ratio'] == 0
    drawn = [p for p in pictures.rglob('*') if p.suffix in ('.png', '.jpg')]
    assert len(drawn) == 4


def test_resume_without_a_checkpoint_keeps_load_from(run_tool, short_options, tmp_path):
    config = 'configs/demo/resnet18_digits.py'
    start, fresh = tmp_path / 'start', tmp_path / 'fresh'
    assert run_tool('train', config, '--work-dir', start, *short_options(config))[0] == 0
    options = short_options(config, f'load_from={start}/epoch_1.pth')
    code, out, err = run_tool('train', config, '--work-dir', fresh, '--resume', *options)
    assert code == 0, err
    assert f'Load checkpoint from {start}/epoch_1.pth' in out + err


def test_predictions_as_pickle(run_tool, short_options, tmp_path):
    config = 'configs/demo/resnet18_digits.py'
    options = short_options(config)
    assert run_tool('train', config, '--work-dir', tmp_path, *options)[0] == 0
    args = [config, tmp_path / 'epoch_1.pth', '--work-dir', tmp_path]
    code, _, err = run_tool('test', *args, '--out', tmp_path / 'all.pkl', *options)
    assert code == 0, err
    with open(tmp_path / 'all.pkl', 'rb') as file:
        predictions = pickle.load(file)
    assert len(predictions) == 4
    assert predictions[0]['pred_score'].shape == (10,)


def test_mmcv_without_ops_is_one_message(run_tool, short_options, tmp_path, monkeypatch):
    def build(cfg):
        raise ModuleNotFoundError("No module named 'mmcv._ext'")

    monkeypatch.setattr('mmengine.runner.Runner.from_cfg', build)
    config = 'configs/demo/resnet18_digits.py'
    code, _, err = run_tool('train', config, '--work-dir', tmp_path, *short_options(config))
    assert code == 2
    assert 'installed without its compiled ops: reinstall it' in err


def test_missing_data_is_named_before_training(run_tool, tmp_path):
    config = 'configs/demo/resnet18_digits.py'
    nowhere = tmp_path / 'nowhere'
    options = [f'train_dataloader.dataset.data_root={nowhere}', 'demo_data.root=' + str(tmp_path)]
    code, _, err = run_tool('train', config, '--work-dir', tmp_path, '--cfg-options', *options)
    assert code == 2
    assert str(nowhere) in err
    assert 'train_dataloader.dataset' in err


def test_amp_needs_a_gpu(run_tool, tmp_path):
    if torch.cuda.is_available():
        pytest.skip('there is a GPU: AMP works (this checks machines without CUDA)')
    code, _, err = run_tool('train', 'configs/demo/resnet18_digits.py', '--amp')
    assert code == 2
    assert '--amp needs a GPU' in err


def test_two_processes_without_a_gpu(short_options, tmp_path):
    """Through the launcher script, on gloo; both ranks share one training set."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    config = 'configs/demo/resnet18_digits.py'
    env = {**os.environ, 'PORT': str(port), 'PYTHON': sys.executable, 'OMP_NUM_THREADS': '1'}
    env['CUDA_VISIBLE_DEVICES'] = ''
    options = short_options(config, 'default_hooks.logger.interval=1')
    cmd = ['tools/dist_train.sh', config, '2', '--work-dir', str(tmp_path), *options]
    done = subprocess.run(cmd, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    # 4 pictures in batches of 2 on 2 ranks are one step
    assert '[1][1/1]' in done.stdout + done.stderr
    cmd = ['tools/dist_test.sh', config, str(tmp_path / 'epoch_1.pth'), '2']
    cmd += ['--work-dir', str(tmp_path), '--out', str(tmp_path / 'two.json'), *options]
    done = subprocess.run(cmd, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'accuracy/top1' in json.loads((tmp_path / 'two.json').read_text())['metrics']
