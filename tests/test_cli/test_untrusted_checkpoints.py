# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Files of other people through every tool: none of them runs what is in it."""

import shutil
from pathlib import Path

import malicious
import pytest
import torch
from mmengine.config import Config

from fgc_mm.cli.config import merge_options

GATED = 'configs/demo/resnet18_digits_gated.py'
DENSE = 'configs/demo/resnet18_digits.py'
INIT = 'model.backbone.init_cfg'


@pytest.fixture
def bad_file(demo_checkpoint, tmp_path):
    """``bad_file(way)``: weights that fit the gated classifier, and more; the file, the marker."""

    def make(way):
        demo_checkpoint('resnet18_digits_gated', tmp_path / 'good.pth')
        content = torch.load(tmp_path / 'good.pth', weights_only=True)
        content['meta'].update(iter=3)
        marker = tmp_path / 'marker'
        torch.save(malicious.WAYS[way](content, marker), tmp_path / 'epoch_3.pth')
        return tmp_path / 'epoch_3.pth', marker

    return make


@pytest.fixture
def call(run_tool, short_options, demo_root, tmp_path):
    """``call(use, file, *more)``: one of the ways in which tools load checkpoints."""

    def run(use, file, *more):
        work = ['--work-dir', tmp_path / 'work']
        options = short_options(GATED)
        commands = {
            'resume': ['train', GATED, '--resume', file, *work, *more, *options],
            'resume auto': ['train', GATED, '--resume', *work, *more, *options],
            'resume config': ['train', GATED, *work, *more, *options, 'resume=True'],
            'load_from': ['train', GATED, *work, *more, *options, f'load_from={file}'],
            'init_cfg': [
                'train', GATED, *work, *more, *options,
                f'{INIT}.type=Pretrained', f'{INIT}.checkpoint={file}', f'{INIT}.prefix=backbone.',
            ],
            'test': ['test', GATED, file, *work, *more, *options],
            'slim': ['slim', GATED, file, '--out-dir', tmp_path / 'slim', *work, *more, *options],
            'export': ['export', GATED, file, '--out', tmp_path / 'x.onnx', *work, *more, *options],
            'infer': [
                'infer', GATED, file, demo_root / 'classification' / 'val' / '0',
                '--out-dir', tmp_path / 'out', *more,
            ],
            'publish': ['publish', file, tmp_path / 'public', *more],
            'analyze': ['analyze', 'cost', GATED, file, '--no-cache', *more, *options],
            'convert': ['convert_weights', file, tmp_path / 'converted.pth', *more],
            'report': ['report', tmp_path / 'run', '--max-images', 2, *more],
        }  # fmt: skip
        if use in ('resume auto', 'resume config'):
            (tmp_path / 'work').mkdir()
            moved = shutil.copy(file, tmp_path / 'work')
            (tmp_path / 'work' / 'last_checkpoint').write_text(str(moved))
        elif use == 'report':
            (tmp_path / 'run').mkdir()
            shutil.copy(file, tmp_path / 'run')
            cfg = Config.fromfile(GATED)
            merge_options(cfg, options[1:])
            cfg.dump(tmp_path / 'run' / Path(GATED).name)
        return run_tool(*commands[use])

    return run


USES = [
    'resume', 'resume auto', 'resume config', 'load_from', 'init_cfg', 'test', 'slim', 'export',
    'infer', 'publish', 'analyze', 'convert', 'report',
]  # fmt: skip


@pytest.mark.parametrize(
    ('use', 'way'),
    [*((use, 'pickle') for use in USES), *((use, 'config') for use in ('resume', 'test', 'infer'))],
)
def test_no_tool_runs_code_of_a_checkpoint(use, way, call, bad_file):
    file, marker = bad_file(way)
    code, out, err = call(use, file)
    assert not marker.exists()
    found = 'os.makedirs' if way == 'pickle' else "line 2, __import__('os').makedirs("
    said = dict(report=out).get(use, err)
    assert 'epoch_3.pth was not loaded: ' in said and found in said, said[-2000:]
    assert '--trust-checkpoint if you trust' in said and 'Traceback' not in err
    assert code == dict(report=0).get(use, 2)


@pytest.mark.parametrize('use', ['publish', 'infer', 'convert'])
def test_who_trusts_a_file_loads_it(use, call, bad_file):
    file, marker = bad_file('pickle')
    code, _, err = call(use, file, '--trust-checkpoint')
    assert marker.is_dir()
    if use == 'convert':  # it wants tensors of other code bases, and says so
        assert code == 2 and 'was not loaded' not in err
    else:
        assert code == 0, err


def test_resuming_a_trusted_file_runs_its_config(call, bad_file):
    """What is refused above is real."""
    file, marker = bad_file('config')
    code, _, err = call('resume', file, '--trust-checkpoint')
    assert marker.is_dir()
    assert code == 2 and 'message_hub' in err  # the file has nothing else to resume


def test_the_tools_that_start_others_hand_it_on(run_tool, tmp_path):
    config = 'configs/demo/resnet18_digits_fgc.py'
    args = [config, '--seeds', 0, '--dry-run', '--work-dir', tmp_path]
    for tool in (['sweep', '--set', 'FGCHook.k', '5'], ['tradeoff', '--targets', '0.5']):
        for flags in ([], ['--trust-checkpoint']):
            code, out, err = run_tool(tool[0], *args, *tool[1:], *flags)
            assert code == 0, err
            lines = [line for line in out.splitlines() if 'tools/' in line]
            assert len(lines) >= 2
            assert all(('--trust-checkpoint' in line) == bool(flags) for line in lines)


def test_last_checkpoint_does_not_lead_elsewhere(run_tool, short_options, tmp_path, bad_file):
    file, _ = bad_file('pickle')
    work = tmp_path / 'work'
    work.mkdir()
    for named in (str(file), f'{work}/../{file.name}'):
        (work / 'last_checkpoint').write_text(named)
        for how in (['--resume'], []):
            args = [DENSE, '--work-dir', work, *how, *short_options(DENSE)]
            code, _, err = run_tool('train', *args, *([] if how else ['resume=True']))
            assert code == 2
            assert f'last_checkpoint names {named}, which is not in this work dir' in err
            assert f'--resume {named}' in err
