# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""``fgc gate`` from a dense checkpoint to files that other commands take."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from forget import forget_runs
from mmengine.config import Config
from mmengine.model import BaseModule
from mmengine.registry import MODELS, init_default_scope

DEMOS = ('resnet18_digits', 'faster_rcnn_r18_digits', 'pspnet_r18_digits')
QUICK = ['--steps', 6, '--target', 0.7]

RTMDET = """
_base_ = 'mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py'
model = dict(
    backbone=dict(widen_factor=0.125, init_cfg=None),
    neck=dict(in_channels=[32, 64, 128], out_channels=32),
    bbox_head=dict(in_channels=32, feat_channels=32, num_classes=3))
train_pipeline = _base_.train_pipeline
sizes = dict(img_scale=(64, 64), scale=(96, 96), crop_size=(64, 64), size=(64, 64))
for step in train_pipeline:
    step.update({key: value for key, value in sizes.items() if key in step})
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),
    dict(type='Pad', size=(64, 64), pad_val=dict(img=(114, 114, 114))),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False,
                        dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False,
                      dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
"""


def dense_checkpoint(config, path):
    """Weights of a model as it is built."""
    cfg = Config.fromfile(config)
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    torch.save(dict(state_dict=model.state_dict(), meta=dict(epoch=3)), path)


@pytest.fixture
def gate(run_tool, short_options, demo_checkpoint, tmp_path):
    """``gate(demo config, *options)``: the exit code, output, errors, and the files' stem."""

    def run(name, *more, options=()):
        forget_runs()
        config, checkpoint = f'configs/demo/{name}.py', tmp_path / 'dense.pth'
        if not checkpoint.exists():
            demo_checkpoint(name, checkpoint)
        done = run_tool(
            'gate', config, checkpoint, '--work-dir', tmp_path / 'work', *more,
            *short_options(config, 'train_dataloader.dataset.indices=24', *options),
        )  # fmt: skip
        return *done, tmp_path / 'work' / f'{name}_gated'

    return run


@pytest.mark.parametrize('name', DEMOS)
def test_each_task(name, gate, run_tool, tmp_path):
    code, out, err, stem = gate(name, *QUICK, '--static')
    assert code == 0, err
    assert 'MACs of the backbone' in out
    # A detector that has learned nothing finds nothing.
    assert ('Agreement with the dense network' in out) == (name != 'faster_rcnn_r18_digits')
    report = json.loads(stem.with_suffix('.json').read_text())
    assert report['share'] == pytest.approx(0.7, abs=0.02)
    assert 0 <= (report['agreement'] or 0) <= 1 and report['pictures'] == 2
    assert set(report['metrics']) == {'dense', 'gated'} and report['steps'] == 6
    assert all(value > 0 for value in report['milliseconds'].values())
    before = torch.load(tmp_path / 'dense.pth')['state_dict']
    after = torch.load(stem.parent / 'dense_gated.pth')['state_dict']
    heads = [key for key in before if not key.startswith(('backbone.', 'data_preprocessor.'))]
    assert heads and all(torch.equal(before[key], after[key]) for key in heads)
    learned = [key for key in before if key.startswith('backbone.') and key.endswith('.weight')]
    assert any(not torch.equal(before[key], after[key]) for key in learned)
    # What comes out is what other commands take.
    out = tmp_path / 'test.json'
    found = f'{stem}.py', stem.parent / 'dense_gated.pth'
    code, _, err = run_tool('test', *found, '--work-dir', tmp_path / 'w', '--out', out)
    assert code == 0, err
    assert 20 < json.loads(out.read_text())['metrics']['macs/pruning_ratio'] < 40


def test_gates_that_depend_on_the_picture(gate, run_tool, tmp_path):
    code, _, err, stem = gate('resnet18_digits', '--steps', 40, '--target', 0.7)
    assert code == 0, err
    report = json.loads(stem.with_suffix('.json').read_text())
    assert report['share'] < 0.9 and not report['static']
    cfg = Config.fromfile(f'{stem}.py')
    assert cfg.model.backbone.gate.type == 'BinConcreteGate'
    assert cfg.load_from == str(stem.parent / 'dense_gated.pth')
    assert [hook.type for hook in cfg.custom_hooks] == ['BudgetHook', 'GatedMACsHook']
    code, out, err = run_tool('infer', f'{stem}.py', cfg.load_from, first_picture(cfg),
                              '--out-dir', tmp_path / 'seen')  # fmt: skip
    assert code == 0 and 'executed' in out, err


def first_picture(cfg):
    return next(Path(cfg.val_dataloader.dataset.data_root, 'val').rglob('*.png'))


def test_rtmdet_on_a_folder_of_pictures(run_tool, demo_root, tmp_path):
    (tmp_path / 'rtmdet.py').write_text(RTMDET)
    dense_checkpoint(tmp_path / 'rtmdet.py', tmp_path / 'dense.pth')
    pictures = tmp_path / 'pictures' / 'more'
    pictures.mkdir(parents=True)
    scenes = sorted(Path(demo_root, 'detection/VOCdevkit/digits/JPEGImages').glob('*.jpg'))
    for path in scenes[:12]:
        shutil.copy(path, pictures)
    code, out, err = run_tool(
        'gate', tmp_path / 'rtmdet.py', tmp_path / 'dense.pth', *QUICK, '--static',
        '--pictures', pictures.parent, '--work-dir', tmp_path / 'work',
    )  # fmt: skip
    assert code == 0, err
    assert 'No metric of the task' in out and 'CachedMosaic is left out' in out + err
    report = json.loads((tmp_path / 'work/rtmdet_gated.json').read_text())
    assert report['share'] == pytest.approx(0.7, abs=0.02)


def test_annotations_are_not_read(gate, demo_root, tmp_path):
    """Not even where the config's own pictures are taken: here they are gone."""
    tree = tmp_path / 'tree'
    shutil.copytree(Path(demo_root, 'detection/VOCdevkit'), tree)
    for path in (tree / 'digits/Annotations').iterdir():
        path.unlink()
    splits = ('train', 'val', 'test')
    options = [f'{split}_dataloader.dataset.data_root={tree}/' for split in splits]
    code, out, err, _ = gate('faster_rcnn_r18_digits', *QUICK, '--static', options=options)
    assert code == 0, err
    assert 'No metric of the task' in out


def test_a_training_that_was_stopped_goes_on(gate, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr('fgc_mm.gating.run._report', killed)
        gate('resnet18_digits', *QUICK, '--static')
    assert not list((tmp_path / 'work').glob('*_gated*'))
    for options, message in (
        (['--target', 0.6], 'begun with target=0.7, not 0.6'),
        (['--target', 0.7], 'begun with static=True, not False'),
        ([*QUICK[2:], '--static', '--steps', 9], 'begun with steps=6, not 9'),
    ):
        code, _, err, _ = gate('resnet18_digits', *options, '--resume')
        assert code == 2 and message in err
    code, _, err, stem = gate('resnet18_digits', *QUICK[2:], '--static', '--resume')
    assert code == 0, err
    assert json.loads(stem.with_suffix('.json').read_text())['steps'] == 6
    state = torch.load(tmp_path / 'dense.pth')
    state['state_dict']['backbone.conv1.weight'] += 1
    torch.save(state, tmp_path / 'dense.pth')
    code, _, err, _ = gate('resnet18_digits', *QUICK[2:], '--static', '--resume')
    assert code == 2 and 'is not the teacher that this training was begun with' in err


def test_minutes_become_steps(gate):
    code, _, err, stem = gate('resnet18_digits', '--target', 0.8, '--static', '--minutes', 0.05)
    assert code == 0, err
    assert json.loads(stem.with_suffix('.json').read_text())['steps'] >= 1


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--target', 0], 'target=0.0 must be within (0, 1)'),
        (['--target', 1.5], 'target=1.5 must be within (0, 1)'),
        (['--target', 0.5, '--steps', 0], 'steps=0 must be 1 or more'),
        (['--target', 0.5, '--minutes', 0], 'minutes=0.0 must be positive'),
        (['--target', 0.01, '--static', '--steps', 2], 'target=0.01 cannot be reached'),
        (['--target', 0.01, '--steps', 2], 'target=0.01'),
        (['--target', 0.5, '--pictures', '{place}/none'], 'none is no folder of pictures'),
        (['--target', 0.5, '--pictures', '{place}/empty'], 'has no pictures (files ending in'),
        (['--target', 0.5, '--pictures', '{place}/broken'], 'a.png cannot be read'),
        (['--target', 0.5, '--pictures', '{place}/cut'], 'b.png'),
        (['--target', 0.5, '--resume'], 'has no training of fgc gate to go on with'),
    ],
)
def test_what_cannot_be(options, message, gate, demo_root, tmp_path):
    pictures = sorted(Path(demo_root, 'classification/train/1').glob('*.png'))
    for name in ('empty', 'broken', 'cut'):
        (tmp_path / name).mkdir()
    (tmp_path / 'broken/a.png').write_text('no picture')
    for number, name in enumerate('abcd'):
        content = pictures[number].read_bytes()
        (tmp_path / f'cut/{name}.png').write_bytes(content if name != 'b' else content[:200])
    options = [str(option).replace('{place}', str(tmp_path)) for option in options]
    more = [] if {'--steps', '--minutes', '--resume'} & set(options) else ['--steps', '6']
    code, _, err, stem = gate('resnet18_digits', *options, *more)
    assert code == 2 and message in err, err
    assert err.count('error:') == 1 and 'Traceback' not in err
    assert not list(stem.parent.glob('*_gated*'))


def test_a_checkpoint_of_another_network(gate, tmp_path):
    torch.save(dict(state_dict=torch.nn.Linear(3, 3).state_dict()), tmp_path / 'dense.pth')
    code, _, err, stem = gate('resnet18_digits', *QUICK)
    assert code == 2 and 'does not belong to this config' in err
    assert not list(stem.parent.glob('*_gated*'))


@MODELS.register_module()
class OneLayer(BaseModule):
    """Its output is the network's, so all of it is needed."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 128, 3)

    def forward(self, x):
        return (self.conv(x),)


def test_a_network_without_sites(run_tool, demo_root, tmp_path):
    (tmp_path / 'one.py').write_text(
        f"_base_ = '{os.getcwd()}/configs/demo/resnet18_digits.py'\n"
        "model = dict(backbone=dict(_delete_=True, type='OneLayer'))\n"
    )
    dense_checkpoint(tmp_path / 'one.py', tmp_path / 'dense.pth')
    code, _, err = run_tool(
        'gate', tmp_path / 'one.py', tmp_path / 'dense.pth', *QUICK, '--work-dir',
        tmp_path / 'work', '--pictures', Path(demo_root, 'classification/train'),
    )  # fmt: skip
    assert code == 2 and err.count('error:') == 1
    assert 'OneLayer has no site to put a gate on' in err
    assert not list((tmp_path / 'work').glob('*_gated*'))
