# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""tools/slim.py and tools/test.py --sparse on the demo configs."""

import json
import os

import pytest

DEMOS = {
    'resnet18_digits_gated': 'accuracy/top1',
    'faster_rcnn_r18_digits_gated': 'pascal_voc/mAP',
    'pspnet_r18_digits_gated': 'mIoU',
}


@pytest.mark.parametrize('name', DEMOS)
def test_slim_then_test_masked_and_sparse(name, run_tool, short_options, demo_checkpoint, tmp_path):
    config, checkpoint = f'configs/demo/{name}.py', tmp_path / 'model.pth'
    demo_checkpoint(name, checkpoint)
    options = short_options(config)
    code, out, err = run_tool('slim', config, checkpoint, '--work-dir', tmp_path / 'w', *options)
    assert code == 0, err
    assert 'Backbone outputs: the same up to rounding' in out
    report = json.loads((tmp_path / 'model_slim.json').read_text())
    assert report['images'] == 4
    assert report['parameters']['after'] < report['parameters']['before']
    assert report['file_bytes']['after'] < report['file_bytes']['before']
    assert (tmp_path / 'model_slim.pth').stat().st_size == report['file_bytes']['after']

    figures = {}
    for kind, args in {
        'before': (config, checkpoint, *options),
        'after': (tmp_path / f'{name}_slim.py', tmp_path / 'model_slim.pth'),
        'sparse': (tmp_path / f'{name}_slim.py', tmp_path / 'model_slim.pth', '--sparse'),
    }.items():
        path = tmp_path / f'{kind}.json'
        extra = ('--work-dir', tmp_path / 'w', '--out', path)
        code, _, err = run_tool('test', *args[:2], *extra, *args[2:])
        assert code == 0, err
        figures[kind] = json.loads(path.read_text())['metrics']
    for kind in ('after', 'sparse'):
        assert figures[kind][DEMOS[name]] == pytest.approx(figures['before'][DEMOS[name]])
        macs = 'macs/backbone_executed_G'
        assert figures[kind][macs] == pytest.approx(report['metrics']['after'][macs])
        assert figures[kind][macs] < figures['before'][macs]


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


def test_mistakes_are_one_message_and_leave_no_file(
    run_tool, short_options, demo_checkpoint, tmp_path
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
    code, _, err = run_tool('test', dense, checkpoint, '--sparse', *short_options(dense))
    assert code == 2 and '--sparse: the model of' in err
