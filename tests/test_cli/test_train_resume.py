# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""tools/train.py on a full disk, after a damaged checkpoint, and twice with the same seed."""

import os

import pytest
import torch
from trainings import differences, outcome

from fgc_mm.runtime.checkpoints.resume_point import find_resume_point

FGC = 'configs/demo/resnet18_digits_fgc.py'
SMALL = ['custom_hooks.3.k=2', 'train_cfg.val_interval=1', 'default_hooks.checkpoint.interval=1']


def test_a_full_disk(run_tool, short_options, tmp_path, room_for_files_of):
    options = short_options(FGC, *SMALL)
    assert run_tool('train', FGC, '--work-dir', tmp_path, *options)[0] == 0
    kept = {path.name: path.read_bytes() for path in tmp_path.glob('*.pth')}
    assert sorted(kept) == ['epoch_1.banks.pth', 'epoch_1.pth']
    more = short_options(FGC, *SMALL, 'train_cfg.max_epochs=2')
    with room_for_files_of(len(kept['epoch_1.pth']) // 2):  # and of banks and logs
        code, _, err = run_tool('train', FGC, '--work-dir', tmp_path, '--resume', *more)
    assert code == 2 and 'Traceback' not in err
    assert f'error: {tmp_path}/epoch_2.pth could not be saved: File too large. ' in err
    assert f'The last whole checkpoint, {tmp_path}/epoch_1.pth, is untouched. Make room' in err
    assert {path.name: path.read_bytes() for path in tmp_path.glob('*.pth')} == kept
    assert not list(tmp_path.glob('*.partial'))
    assert find_resume_point(str(tmp_path)) == (str(tmp_path / 'epoch_1.pth'), None)
    assert run_tool('train', FGC, '--work-dir', tmp_path, '--resume', *more)[0] == 0
    names = sorted(path.name for path in tmp_path.glob('*.pth'))
    assert names == ['epoch_2.banks.pth', 'epoch_2.pth']


def test_no_room_for_the_config(run_tool, short_options, tmp_path, room_for_files_of):
    """That of the run before is still there."""
    config, work_dir = tmp_path / 'mine.py', tmp_path / 'work'
    config.write_text(f"_base_ = {os.path.abspath(FGC)!r}\nnote = 'x' * 50_000\n")
    work_dir.mkdir()
    before = b'#' * 20_000
    (work_dir / config.name).write_bytes(before)
    options = short_options(FGC, *SMALL, 'log_level=ERROR')
    with room_for_files_of(len(before)):  # also of what is printed here
        code, _, err = run_tool('train', config, '--work-dir', work_dir, *options)
    assert code == 2 and 'Traceback' not in err
    assert f'error: File too large: the work dir {work_dir} cannot be written; make room' in err
    assert (work_dir / config.name).read_bytes() == before


def test_a_broken_checkpoint(run_tool, short_options, tmp_path):
    options = short_options(
        FGC, *SMALL, 'train_cfg.max_epochs=2', 'default_hooks.checkpoint.max_keep_ckpts=2'
    )
    train = ['train', FGC, '--work-dir', tmp_path]
    assert run_tool(*train, *options)[0] == 0
    weights = torch.load(tmp_path / 'epoch_2.pth', weights_only=False)['state_dict']
    path = tmp_path / 'epoch_2.pth'
    path.write_bytes(path.read_bytes()[:5000])
    code, _, err = run_tool(*train, '--resume', path, *options)
    assert code == 2 and f'error: --resume: checkpoint {path} cannot be read: it is cut' in err

    code, out, err = run_tool(*train, '--resume', *options)
    assert code == 0, err
    assert f'names {path}, which cannot be read: it is cut short' in out + err
    assert f'going on from the newest whole checkpoint, {tmp_path / "epoch_1.pth"}' in out + err
    again = torch.load(path, weights_only=False)['state_dict']
    assert not differences(weights, again)

    for path in tmp_path.glob('epoch_?.pth'):
        path.write_bytes(b'')
    code, _, err = run_tool(*train, '--resume', *options)
    assert (
        code == 2
        and 'of 2 checkpoints beside it none is whole. Name a checkpoint by --resume' in err
    )
    assert 'Traceback' not in err


@pytest.mark.parametrize(
    ('config', 'workers'),
    [
        ('resnet18_digits_gated', 0),
        pytest.param('resnet18_digits_gated', 2, marks=pytest.mark.slow),
        pytest.param('faster_rcnn_r18_digits_gated', 0, marks=pytest.mark.slow),
        pytest.param('pspnet_r18_digits_gated', 0, marks=pytest.mark.slow),
    ],
)
def test_the_same_seed_gives_the_same_bits(config, workers, run_tool, short_options, tmp_path):
    """And another seed does not."""
    path = f'configs/demo/{config}.py'
    loading = f'train_dataloader.num_workers={workers}'
    results = []
    for name, seed in (('one', 0), ('two', 0), ('three', 1)):
        options = short_options(path, f'randomness.seed={seed}', 'load_from=None', loading)
        assert run_tool('train', path, '--work-dir', tmp_path / name, *options)[0] == 0
        results.append(outcome(tmp_path / name, epochs=1))
    one, two, three = results
    assert differences(one, two) == []
    assert any('backbone' in name for name in differences(one, three))
