# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A trained network in the task's own inferencer, tools/infer.py and tools/publish.py."""

import csv
import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trained(run_tool, short_options, tmp_path):
    """``trained(config)``: the checkpoint of two steps."""

    def train(config, *more):
        options = short_options(config, *more)
        code, _, err = run_tool('train', config, '--work-dir', tmp_path / 'work', *options)
        assert code == 0, err
        return str(tmp_path / 'work' / 'epoch_1.pth')

    return train


@pytest.fixture
def photos(demo_root, tmp_path):
    """Two pictures of each task and a file that is none."""

    def copy(pattern):
        folder = tmp_path / 'photos'
        folder.mkdir()
        for source in sorted(demo_root.glob(pattern))[:2]:
            shutil.copy(source, folder)
        (folder / 'notes.txt').write_text('no picture')
        return folder

    return copy


def detect(config, checkpoint, picture):
    from mmdet.apis import DetInferencer

    inferencer = DetInferencer(config, checkpoint, device='cpu', show_progress=False)
    assert inferencer.model.dataset_meta['classes'][3] == 'three'
    return inferencer.model, inferencer(picture, return_vis=True)['visualization'][0]


def segment(config, checkpoint, picture):
    from mmseg.apis import MMSegInferencer

    inferencer = MMSegInferencer(config, checkpoint, device='cpu')
    assert inferencer.model.dataset_meta['classes'][1] == 'zero'
    result = inferencer(picture, return_vis=True)
    assert result['predictions'].shape == (128, 128)
    return inferencer.model, result['visualization']


def classify(config, checkpoint, picture):
    from mmpretrain import ImageClassificationInferencer

    inferencer = ImageClassificationInferencer(config, checkpoint, device='cpu')
    (result,) = inferencer(picture)
    assert result['pred_class'] == str(result['pred_label'])
    return inferencer.model, result['pred_scores']


TASKS = {
    'faster_rcnn_r18_digits_gated': ('detection/VOCdevkit/digits/JPEGImages/*.jpg', detect),
    'pspnet_r18_digits_gated': ('segmentation/leftImg8bit/val/*/*.png', segment),
    'resnet18_digits_gated': ('classification/val/*/*.png', classify),
}


@pytest.mark.parametrize('name', TASKS)
def test_inferencer_infer_and_publish(name, run_tool, trained, photos, tmp_path):
    from fgc_mm.gates import find_gates

    pattern, use_inferencer = TASKS[name]
    config = f'configs/demo/{name}.py'
    # Gates that start undecided instead of open, in a network that starts from nothing.
    half_open = ['model.backbone.gate.type=BinConcreteGate', 'model.backbone.gate.bias_init=0']
    half_open.append('load_from=None')
    checkpoint = trained(config, *half_open)
    folder = photos(pattern)
    pictures = sorted(str(path) for path in folder.iterdir() if path.suffix != '.txt')

    model, result = use_inferencer(config, checkpoint, pictures[0])
    assert np.isfinite(result).all() and len(find_gates(model)) == 8
    weights = torch.load(checkpoint, weights_only=False)['state_dict']
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())

    out = tmp_path / 'out'
    code, printed, err = run_tool('infer', config, checkpoint, folder, '--out-dir', out)
    assert code == 0, err
    drawn = sorted(path.stem for path in (out / 'vis').iterdir())
    assert drawn == [Path(picture).stem for picture in pictures]
    with open(out / 'macs.csv') as file:
        rows = list(csv.DictReader(file))
    assert [row['picture'] for row in rows] == pictures
    figures = json.loads((out / 'macs.json').read_text())
    executed = [row['backbone_executed_G'] for row in figures['pictures']]
    dense = [row['backbone_dense_G'] for row in figures['pictures']]
    ratio = 100 * (1 - sum(executed) / sum(dense))
    assert figures['all']['pruning_ratio'] == pytest.approx(ratio) and ratio > 5
    assert f'{ratio:.2f}' in printed and Path(pictures[1]).name in printed

    code, printed, err = run_tool('publish', checkpoint, tmp_path / 'public' / 'net.pth')
    assert code == 0, err
    (public,) = (tmp_path / 'public').iterdir()
    digits = hashlib.sha256(public.read_bytes()).hexdigest()[:8]
    assert public.name == f'net-{digits}.pth' and str(public) in printed
    content = torch.load(public, weights_only=True)
    assert set(content) == {'meta', 'state_dict'} and 'backbone' in content['meta']['cfg']
    assert content['meta']['dataset_meta']['classes']
    again = tmp_path / 'again'
    code, _, err = run_tool('infer', config, public, pictures[0], '--out-dir', again)
    assert code == 0, err
    (row,) = json.loads((again / 'macs.json').read_text())['pictures']
    assert row == figures['pictures'][0]


def test_publishing_takes_the_averaged_weights(run_tool, trained, tmp_path):
    config = tmp_path / 'resnet18_digits_ema.py'
    base = ROOT / 'configs/demo/resnet18_digits.py'
    config.write_text(f"_base_ = '{base}'\ncustom_hooks = [dict(type='EMAHook', momentum=0.5)]\n")
    checkpoint = torch.load(source := trained(config), weights_only=False)
    assert 'ema_state_dict' in checkpoint and 'optimizer' in checkpoint
    key = 'backbone.conv1.weight'
    averaged = checkpoint['state_dict'][key]
    current = checkpoint['ema_state_dict'][f'module.{key}']
    assert not torch.equal(averaged, current)
    for options, expected in (([], averaged), (['--no-ema'], current)):
        code, out, err = run_tool('publish', source, tmp_path / 'ema.pth', *options)
        assert code == 0, err
        file = re.match(r'(.*-[0-9a-f]{8}\.pth): ', out)[1]
        content = torch.load(file, weights_only=True)
        assert torch.equal(content['state_dict'][key], expected)
        assert 'ema_state_dict' not in content


@pytest.mark.parametrize(
    ('content', 'options', 'message'),
    [
        (b'hello', [], 'cannot be read as a checkpoint'),
        (dict(meta={}), [], 'holds no weights'),
        (dict(state_dict=dict(a=torch.ones(1))), ['--no-ema'], 'has no `ema_state_dict`'),
    ],
)
def test_what_cannot_be_published(content, options, message, run_tool, tmp_path):
    source = tmp_path / 'in.pth'
    source.write_bytes(content) if isinstance(content, bytes) else torch.save(content, source)
    target = tmp_path / 'public'
    target.mkdir()
    code, _, err = run_tool('publish', source, target / 'out.pth', *options)
    assert code == 2 and f'error: {source}' in err and message in err
    assert not list(target.iterdir())


def test_publishing_into_a_folder_and_inferring_nothing(run_tool, tmp_path):
    torch.save(dict(state_dict=dict(a=torch.ones(1))), tmp_path / 'in.pth')
    code, _, err = run_tool('publish', tmp_path / 'in.pth', tmp_path)
    assert code == 2 and 'is a folder; name a file in it' in err
    config = 'configs/demo/resnet18_digits.py'
    (tmp_path / 'empty').mkdir()
    code, _, err = run_tool('infer', config, tmp_path / 'in.pth', tmp_path / 'empty')
    assert code == 2 and 'has no picture directly in it' in err
    code, _, err = run_tool('infer', config, tmp_path / 'in.pth', tmp_path / 'nowhere.jpg')
    assert code == 2 and 'nowhere.jpg is neither a picture nor a folder' in err


def test_a_writer_that_fails_leaves_nothing(monkeypatch, tmp_path):
    """The disk is full in the middle: the older publication stays, no half file is left."""
    from fgc_mm.runtime import publish as module

    torch.save(dict(state_dict=dict(a=torch.ones(1))), tmp_path / 'in.pth')
    older = module.publish(tmp_path / 'in.pth', tmp_path / 'out' / 'net.pth')

    def full(content, file):
        file.write(b'half')
        raise OSError('No space left on device')

    monkeypatch.setattr(module.torch, 'save', full)
    with pytest.raises(OSError, match='No space'):
        module.publish(tmp_path / 'in.pth', tmp_path / 'out' / 'net.pth')
    assert list((tmp_path / 'out').iterdir()) == [older]
