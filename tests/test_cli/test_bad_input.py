# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Damaged data and wrong checkpoints, through the tools: one message that names the culprit."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

ROOT = Path(__file__).parents[2]
CLASSIFIER = 'configs/demo/resnet18_digits.py'


@pytest.fixture
def few_digits(demo_root, tmp_path):
    """A classification tree with two pictures of each of two classes."""
    root = tmp_path / 'few'
    for split in ('train', 'val'):
        for digit in ('0', '1'):
            (root / split / digit).mkdir(parents=True)
            pictures = sorted((demo_root / 'classification' / split / digit).glob('*.png'))
            for picture in pictures[:2]:
                shutil.copy(picture, root / split / digit)
    return root


def of_root(root):
    return [f'{split}_dataloader.dataset.data_root={root}' for split in ('train', 'val', 'test')]


@pytest.mark.parametrize(
    ('keep', 'message', 'workers'), [(0, 'is empty', 0), (60, '(60 bytes) cannot be decoded', 1)]
)
def test_a_broken_picture_is_named(keep, message, workers, run_tool, short_options, few_digits):
    broken = sorted((few_digits / 'train' / '1').iterdir())[0]
    broken.write_bytes(broken.read_bytes()[:keep])
    options = short_options(
        CLASSIFIER, *of_root(few_digits), f'train_dataloader.num_workers={workers}'
    )
    code, _, err = run_tool('train', CLASSIFIER, '--work-dir', few_digits / 'work', *options)
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith(f'error: picture {broken} ') and message in last


def test_a_broken_picture_in_testing(run_tool, short_options, few_digits):
    checkpoint = save_untrained(CLASSIFIER, few_digits / 'model.pth')
    broken = sorted((few_digits / 'val' / '0').iterdir())[1]
    broken.write_bytes(b'')
    options = short_options(CLASSIFIER, *of_root(few_digits))
    args = [CLASSIFIER, checkpoint, '--work-dir', few_digits / 'work']
    code, _, err = run_tool('test', *args, *options)
    assert code == 2
    assert f'error: picture {broken} is empty' in err


def test_an_annotation_without_picture_is_named_before_training(
    run_tool, short_options, demo_root, tmp_path
):
    config = 'configs/demo/faster_rcnn_r18_digits.py'
    tree = tmp_path / 'VOCdevkit' / 'digits'
    shutil.copytree(demo_root / 'detection' / 'VOCdevkit' / 'digits', tree)
    names = (tree / 'ImageSets' / 'Main' / 'trainval.txt').read_text().split()
    (tree / 'JPEGImages' / f'{names[1]}.jpg').unlink()
    # without `indices`, with which not all of the list is used
    options = [
        o for o in short_options(config, *of_root(tmp_path / 'VOCdevkit')) if 'indices' not in o
    ]
    code, _, err = run_tool('train', config, '--work-dir', tmp_path / 'work', *options)
    assert code == 2
    assert f"images, '{names[1]}' first, have no .jpg file" in err


def save_untrained(config, path, **backbone):
    """A checkpoint as a Runner writes it, of a network that was not trained."""
    import mmpretrain  # noqa: F401

    cfg = Config.fromfile(config)
    cfg.model.backbone.update(backbone)
    cfg.model.data_preprocessor = cfg.get('data_preprocessor')
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(cfg.model)
    torch.save(dict(meta=dict(cfg=cfg.pretty_text), state_dict=model.state_dict()), path)
    return path


@pytest.mark.parametrize(
    ('tool', 'backbone', 'words'),
    [
        ('test', dict(depth=34), ['of the 102 tensors', 'unexpected 80: backbone.layer1.2.conv1']),
        ('infer', dict(base_channels=32), ['other shape ', 'instead of']),
    ],
)
def test_a_checkpoint_of_another_network(
    tool, backbone, words, run_tool, short_options, few_digits, tmp_path
):
    checkpoint = save_untrained(CLASSIFIER, tmp_path / 'other.pth', **backbone)
    if tool == 'test':
        options = ['--work-dir', tmp_path, *short_options(CLASSIFIER)]
    else:
        options = [few_digits / 'val' / '0', '--out-dir', tmp_path / 'out']
    code, _, err = run_tool(tool, CLASSIFIER, checkpoint, *options)
    assert code == 2, err
    message = err[err.index('error: ') :]
    assert message.startswith(f'error: checkpoint {checkpoint} does not belong to this config')
    for word in words:
        assert word in message
    assert 'Traceback' not in err


def test_dense_weights_in_a_gated_network_are_allowed(run_tool, short_options, tmp_path):
    checkpoint = save_untrained(CLASSIFIER, tmp_path / 'dense.pth')
    config = 'configs/demo/resnet18_digits_gated.py'
    figures = tmp_path / 'figures.json'
    args = [config, checkpoint, '--work-dir', tmp_path, '--out', figures, *short_options(config)]
    code, out, err = run_tool('test', *args)
    assert code == 0, err
    # The table of the gates, printed and written.
    assert re.search(r'gate +channels +open, mean +min +max +always on +never on', out + err)
    layers = json.loads(figures.read_text())['layers']
    assert [row['channels'] for row in layers] == [16, 16, 32, 32, 64, 64, 128, 128]
    assert set(layers[0]) == {
        'gate',
        'channels',
        'openness_mean',
        'openness_min',
        'openness_max',
        'always_on',
        'never_on',
    }


def test_a_file_that_is_no_checkpoint(run_tool, few_digits, tmp_path):
    (tmp_path / 'notes.pth').write_text('hello')
    args = [CLASSIFIER, tmp_path / 'notes.pth', few_digits / 'val' / '0']
    code, _, err = run_tool('infer', *args, '--out-dir', tmp_path / 'out')
    assert code == 2
    assert f'error: {tmp_path}/notes.pth cannot be read as a checkpoint' in err


def test_the_metric_listed_for_a_network_without_gates(run_tool, short_options, tmp_path):
    checkpoint = save_untrained(CLASSIFIER, tmp_path / 'dense.pth')
    evaluators = "test_evaluator=[{'type':'Accuracy','topk':(1,5)},{'type':'GatedMACs'}]"
    args = [CLASSIFIER, checkpoint, '--work-dir', tmp_path, '--out', tmp_path / 'figures.json']
    config = tmp_path / 'listed.py'
    config.write_text(
        f"_base_ = '{args[0]}'\n{evaluators}\n".replace("'configs", f"'{ROOT}/configs")
    )
    code, out, err = run_tool('test', config, *args[1:], *short_options(CLASSIFIER))
    assert code == 0, err
    assert 'The model has no gates: nothing is switched off.' in out + err
    figures = json.loads((tmp_path / 'figures.json').read_text())
    assert figures['metrics']['macs/pruning_ratio'] == 0 and figures['layers'] == []
    metrics = figures['metrics']
    assert metrics['error/top1'] == pytest.approx(100 - metrics['accuracy/top1'])
    assert metrics['error/top5'] == pytest.approx(100 - metrics['accuracy/top5'])
    assert 'error/top1' in out[out.index('Results') :]
