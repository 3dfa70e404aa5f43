# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which checkpoint --resume takes."""

import os
import shutil

import pytest
import torch

from fgc_mm.runtime.checkpoints.resume_point import find_resume_point, what_is_wrong


@pytest.fixture
def folder(tmp_path):
    """Three epochs, the last of them latest; a best one, and something unfinished."""
    folder = tmp_path / 'run'
    folder.mkdir()
    best = dict(meta=dict(cfg='optimizer = dict()'), weights=torch.arange(5000.0), message_hub={})
    for number, name in enumerate(['epoch_1', 'epoch_2', 'epoch_3', 'best_acc', 'plain']):
        whole = name.startswith('epoch')
        files = {f'{name}.pth': {**best, 'optimizer': {}} if whole else best}
        if whole:
            files[f'{name}.banks.pth'] = dict(layers={}, rows=torch.arange(5000.0))
        for file, content in files.items():
            torch.save(content, folder / file)
            os.utime(folder / file, (1000 + number,) * 2)
    (folder / 'epoch_4.pth.partial').write_bytes(b'half')
    (folder / 'last_checkpoint').write_text(str(folder / 'epoch_3.pth'))
    return folder


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b'')


def test_the_latest(folder):
    assert find_resume_point(str(folder)) == (str(folder / 'epoch_3.pth'), None)


def test_nothing_yet(tmp_path):
    assert find_resume_point(str(tmp_path)) == (None, None)
    assert find_resume_point(str(tmp_path / 'nowhere')) == (None, None)


@pytest.mark.parametrize(
    ('file', 'damage', 'words'),
    [
        ('epoch_3.pth', os.remove, 'epoch_3.pth, which does not exist'),
        ('epoch_3.pth', cut, 'epoch_3.pth, which cannot be read: it is cut short or damaged (its '),
        ('epoch_3.pth', flip, 'in it has another checksum'),
        ('epoch_3.pth', empty, 'epoch_3.pth, which cannot be read: it is empty'),
        (
            'epoch_3.banks.pth',
            cut,
            'needs epoch_3.banks.pth beside it, which cannot be read: it is cut',
        ),
    ],
)
def test_the_newest_whole_one_instead(file, damage, words, folder):
    damage(folder / file)
    path, notice = find_resume_point(str(folder))
    assert path == str(folder / 'epoch_2.pth')
    assert words in notice and notice.endswith(f'going on from the newest whole checkpoint, {path}')


@pytest.mark.parametrize('damage', [empty, os.remove])
def test_without_the_name_of_the_latest(damage, folder):
    damage(folder / 'last_checkpoint')
    path, notice = find_resume_point(str(folder))
    assert path == str(folder / 'epoch_3.pth')
    assert f'{folder / "last_checkpoint"} is ' in notice


def test_a_folder_that_was_moved(folder, tmp_path):
    shutil.move(folder, tmp_path / 'moved')
    path, notice = find_resume_point(str(tmp_path / 'moved'))
    assert path == str(tmp_path / 'moved' / 'epoch_3.pth')
    assert 'epoch_3.pth, which does not exist; going on from' in notice


def test_none_is_whole(folder):
    for path in folder.glob('epoch_?.pth'):
        cut(path)
    with pytest.raises(
        ValueError, match=r'of 3 checkpoints beside it none is whole. Name a checkpoint by'
    ):
        find_resume_point(str(folder))
    for path in folder.glob('epoch_?.pth'):
        path.unlink()
    with pytest.raises(ValueError, match='which does not exist, and there is no other'):
        find_resume_point(str(folder))


def test_other_storage_is_taken_as_it_is(folder):
    named = 's3://bucket/run/epoch_3.pth'
    (folder / 'last_checkpoint').write_text(named)
    assert find_resume_point(str(folder), [str(folder), 's3://bucket/run']) == (named, None)


def test_a_checkpoint_of_others_is_not_taken(folder, tmp_path):
    others = tmp_path / 'others'
    others.mkdir()
    shutil.copy(folder / 'epoch_1.pth', others / 'epoch_7.pth')
    (folder / 'last_checkpoint').write_text(str(others / 'epoch_7.pth'))
    path, notice = find_resume_point(str(folder))
    assert path == str(folder / 'epoch_3.pth')
    assert 'epoch_7.pth, which is not in this work dir' in notice
    assert find_resume_point(str(folder), [str(others)])[0] == str(others / 'epoch_7.pth')


def test_a_folder_of_deepspeed_is_left_to_it(folder):
    (folder / 'epoch_5.pth').mkdir()
    assert what_is_wrong(str(folder / 'epoch_5.pth')) is None
