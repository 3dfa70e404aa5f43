# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""tools/slim.py and tools/test.py --sparse on the demo configs."""

import importlib
import json
import os
import pickle
import shutil
import sys

import numpy as np
import pytest
import torch
from mmengine.config import Config

BUILDERS = {
    'resnet18_digits_gated': ('mmpretrain.apis', 'get_model'),
    'faster_rcnn_r18_digits_gated': ('mmdet.apis', 'init_detector'),
    'pspnet_r18_digits_gated': ('mmseg.apis', 'init_model'),
}
DEMOS = tuple(BUILDERS)


def assert_same_predictions(samples, wanted):
    """Scores, logits or boxes of each picture are those wanted, up to rounding."""
    assert len(samples) == len(wanted) == 4
    for sample, want in zip(samples, wanted, strict=True):
        for key in {'pred_score', 'seg_logits'} & set(want):
            own, other = (each[key] for each in (sample, want))
            if key == 'seg_logits':
                own, other = own['data'], other['data']
            assert (own - other).abs().max() <= 1e-4 * other.abs().max()
            assert other.std() > 0
        if 'pred_instances' in want:
            assert_same_boxes(sample['pred_instances'], want['pred_instances'])


def assert_same_boxes(boxes, wanted):
    # Rounding may change the order of two boxes, and which of them NMS leaves.
    rows, others = (
        torch.cat([b['bboxes'], 100 * b['labels'][:, None], 1000 * b['scores'][:, None]], dim=1)
        for b in (boxes, wanted)
    )
    assert len(others) >= 20
    nearest = torch.cdist(others, rows, p=float('inf')).min(dim=1).values
    assert (nearest < 0.05).float().mean() >= 0.95


def executed(samples):
    """Mean of the MACs a backbone executed, in G."""
    return np.mean([sample['gated_macs'].backbone_executed for sample in samples]) / 1e9


@pytest.mark.parametrize('name', DEMOS)
def test_slim_then_test_masked_and_sparse(name, run_tool, short_options, demo_checkpoint, tmp_path):
    config, checkpoint = f'configs/demo/{name}.py', tmp_path / 'model.pth'
    demo_checkpoint(name, checkpoint)
    torch.save({**torch.load(checkpoint), 'optimizer': torch.zeros(10**6)}, checkpoint)
    options = short_options(config)
    code, out, err = run_tool('slim', config, checkpoint, '--work-dir', tmp_path / 'w', *options)
    assert code == 0, err
    assert 'Backbone outputs: the same up to rounding' in out
    assert 'it also holds optimizer' in out and '-0.0000' not in out
    report = json.loads((tmp_path / 'model_slim.json').read_text())
    assert report['images'] == 4
    assert report['parameters']['after'] < report['parameters']['before']
    # Weights are compared with weights.
    files, weights = report['file_bytes'], report['weights_bytes']
    assert (tmp_path / 'model_slim.pth').stat().st_size == files['after']
    assert files['before'] < checkpoint.stat().st_size - 3.9e6
    assert files['after'] / files['before'] == pytest.approx(
        weights['after'] / weights['before'], abs=0.02
    )
    before, after = (report['metrics'][key] for key in ('before', 'after'))
    assert after['macs/pruning_ratio'] >= before['macs/pruning_ratio'] - 1e-6

    found = {}
    for kind, args in {
        'before': (config, checkpoint, *options),
        'after': (tmp_path / f'{name}_slim.py', tmp_path / 'model_slim.pth'),
        'sparse': (tmp_path / f'{name}_slim.py', tmp_path / 'model_slim.pth', '--sparse'),
    }.items():
        path = tmp_path / f'{kind}.pkl'
        extra = ('--work-dir', tmp_path / 'w', '--out', path)
        code, _, err = run_tool('test', *args[:2], *extra, *args[2:])
        assert code == 0, err
        found[kind] = pickle.loads(path.read_bytes())
    for kind in ('after', 'sparse'):
        assert_same_predictions(found[kind], found['before'])
        assert executed(found[kind]) == pytest.approx(after['macs/backbone_executed_G'])
        assert executed(found[kind]) < executed(found['before'])

    # The packages' own way to a model.
    builder = BUILDERS[name]
    build = getattr(importlib.import_module(builder[0]), builder[1])
    built = build(str(tmp_path / f'{name}_slim.py'), str(tmp_path / 'model_slim.pth'), device='cpu')
    weights = torch.load(tmp_path / 'model_slim.pth', weights_only=False)['state_dict']
    own = built.state_dict()
    assert set(own) == set(weights)
    assert all(torch.equal(own[key], value) for key, value in weights.items())


def test_tolerance_reports_the_change(run_tool, short_options, demo_checkpoint, tmp_path):
    config, checkpoint = 'configs/demo/resnet18_digits_gated.py', tmp_path / 'model.pth'
    demo_checkpoint('resnet18_digits_gated', checkpoint)
    args = ['--out-dir', tmp_path / 'out', '--work-dir', tmp_path / 'w', '--tolerance', '0.5']
    code, out, err = run_tool('slim', config, checkpoint, *args, *short_options(config))
    assert code == 0, err
    assert 'accuracy/top1' in out and 'open for at most 50 % of them' in out
    assert sorted(os.listdir(tmp_path / 'out')) == [
        'model_slim.json',
        'model_slim.pth',
        'resnet18_digits_gated_slim.py',
    ]
    report = json.loads((tmp_path / 'out' / 'model_slim.json').read_text())
    assert set(report['metrics']['before']) == set(report['metrics']['after'])

    # Another checkpoint's would replace the config; the same one's may.
    before = {path: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
    other = shutil.copy(checkpoint, tmp_path / 'other.pth')
    code, _, err = run_tool('slim', config, other, *args, *short_options(config))
    assert code == 2 and 'is the config of' in err and '--out-dir' in err
    assert before == {path: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
    # And the checkpoint of another config.
    mine = tmp_path / 'mine.py'
    mine.write_text(f"_base_ = '{os.path.abspath(config)}'\n")
    code, _, err = run_tool('slim', mine, checkpoint, *args, *short_options(config))
    assert code == 2 and 'resnet18_digits_gated_slim.py is the config of' in err
    assert before == {path: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
    assert run_tool('slim', config, checkpoint, *args, *short_options(config))[0] == 0

    url = 'https://example.com/model.pth'
    code, _, err = run_tool('slim', config, url, *args[2:], *short_options(config))
    assert code == 2 and 'say where to write by --out-dir' in err


def test_a_network_all_of_whose_gates_are_open(
    run_tool, short_options, demo_checkpoint, tmp_path, monkeypatch
):
    config, checkpoint = 'configs/demo/resnet18_digits_gated.py', tmp_path / 'model.pth'
    demo_checkpoint('resnet18_digits_gated', checkpoint)
    loaded = torch.load(checkpoint)
    for key, tensor in loaded['state_dict'].items():
        if '.gates.' in key and '.fc2.' in key:
            tensor.fill_(9.0 if key.endswith('bias') else 0.0)
    torch.save(loaded, checkpoint)
    options = short_options(config)
    own = tmp_path / f'{DEMOS[0]}.py'
    own.write_text(
        f"_base_ = '{os.path.abspath(config)}'\n"
        "custom_hooks = [dict(type='L0Hook', rho=0.1), dict(type='GatedMACsHook'), "
        "dict(type='SparseInferenceHook')]\n"
    )
    out_dir = os.path.relpath(tmp_path / 'out')
    where = ('--work-dir', tmp_path / 'w')
    code, out, err = run_tool('slim', own, checkpoint, *where, '--out-dir', out_dir, *options)
    assert code == 0, err
    assert 'No gate is left' in out and 'the config is without L0Hook' in out
    report = json.loads((tmp_path / 'out' / 'model_slim.json').read_text())
    assert report['dropped_hooks'] == ['L0Hook']
    slim, weights = tmp_path / 'out' / f'{DEMOS[0]}_slim.py', tmp_path / 'out' / 'model_slim.pth'
    cfg = Config.fromfile(slim)
    assert [hook.type for hook in cfg.custom_hooks] == ['GatedMACsHook', 'SparseInferenceHook']
    assert cfg.load_from == str(weights)  # from wherever it is read

    code, _, err = run_tool('train', slim, *where)
    assert code == 0, err
    found = {}
    for kind, args in {
        'masked': (config, checkpoint, *options),
        'sparse': (slim, weights, '--sparse'),
    }.items():
        path = tmp_path / f'{kind}.pkl'
        code, out, err = run_tool('test', *args[:2], '--out', path, *where, *args[2:])
        assert code == 0, err
        assert ('no gate is left' in out + err) == (kind == 'sparse')
        found[kind] = pickle.loads(path.read_bytes())
    assert_same_predictions(found['sparse'], found['masked'])
    code, _, err = run_tool('slim', slim, weights, *where)
    assert code == 2 and 'nothing to slim' in err and 'Traceback' not in err
    code, out, err = run_tool('export', slim, weights, *where, '--out', tmp_path / 'x.onnx')
    assert code == 0 and '0 gates inside' in out, err


@pytest.mark.parametrize('tolerance', ['0', '0.1'])
def test_outputs_that_are_not_numbers(
    tolerance, run_tool, short_options, demo_checkpoint, tmp_path
):
    config, checkpoint = 'configs/demo/resnet18_digits_gated.py', tmp_path / 'model.pth'
    demo_checkpoint('resnet18_digits_gated', checkpoint)
    loaded = torch.load(checkpoint)
    loaded['state_dict']['backbone.layer4.0.downsample.1.bias'][0] = float('nan')
    torch.save(loaded, checkpoint)
    args = ['--tolerance', tolerance, '--work-dir', tmp_path / 'w', *short_options(config)]
    code, _, err = run_tool('slim', config, checkpoint, *args)
    assert code == 2 and 'backbone outputs, before or after, are nan or infinite' in err
    assert not (tmp_path / 'model_slim.pth').exists()


def test_mistakes_are_one_message_and_leave_no_file(
    run_tool, short_options, demo_checkpoint, tmp_path, monkeypatch
):
    gated, dense = (f'configs/demo/resnet18_digits{s}.py' for s in ('_gated', ''))
    checkpoint = tmp_path / 'model.pth'
    demo_checkpoint('resnet18_digits_gated', checkpoint)
    broken = tmp_path / 'broken.pth'
    broken.write_bytes(checkpoint.read_bytes()[:1000])
    before = sorted(os.listdir(tmp_path))
    none = 'val_dataloader.dataset.indices=0'
    cases = [
        (dense, checkpoint, [], [], 'has no gates, there is nothing to slim'),
        (gated, broken, [], [], 'broken.pth cannot be read'),
        (
            gated,
            checkpoint,
            ['model.backbone.depth=34'],
            [],
            'does not fit the config: ',
        ),
        (gated, checkpoint, [none], [], 'val_dataloader.dataset has no items'),
        (gated, checkpoint, [], ['--tolerance', '1.5'], '--tolerance 1.5 must be within'),
        (gated, tmp_path / 'none.pth', [], [], 'none.pth does not exist'),
        (gated, checkpoint, [], ['--out-dir', str(checkpoint)], 'is a file; name a folder'),
    ]
    for config, weights, options, args, message in cases:
        more = short_options(config, *options)
        where = tmp_path.parent / 'logs'
        code, _, err = run_tool('slim', config, weights, '--work-dir', where, *args, *more)
        assert code == 2 and message in err, err
        assert 'Traceback' not in err
    assert sorted(os.listdir(tmp_path)) == before
    monkeypatch.setattr(sys.modules['fgc_mm.inference.slim_files'], 'EQUAL', -1)
    code, _, err = run_tool('slim', gated, checkpoint, '--work-dir', where, *short_options(gated))
    assert code == 2 and 'is not the same on the images' in err
    assert sorted(os.listdir(tmp_path)) == before
