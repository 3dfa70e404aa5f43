# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A trained network in the task's own inferencer, by `fgc infer`, and published."""

import csv
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch


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
