# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Files are written as a whole or not at all."""

import os
from functools import partial

import pytest
import torch

from fgc_mm.files import replacing, write_files


def fail(file):
    file.write(b'half')
    raise ValueError('no more')


def test_text_bytes_and_what_a_function_writes(tmp_path):
    (tmp_path / 'a.txt').write_text('old')
    write_files(
        {
            tmp_path / 'a.txt': 'ü\n',
            str(tmp_path / 'b.bin'): b'\r\n',
            tmp_path / 'deep' / 'er' / 'c.pth': partial(torch.save, dict(x=torch.ones(2))),
        }
    )
    assert (tmp_path / 'a.txt').read_bytes() == 'ü\n'.encode()
    assert (tmp_path / 'b.bin').read_bytes() == b'\r\n'
    assert torch.load(tmp_path / 'deep' / 'er' / 'c.pth')['x'].sum() == 2
    assert sorted(p.name for p in tmp_path.rglob('*')) == ['a.txt', 'b.bin', 'c.pth', 'deep', 'er']


@pytest.mark.parametrize('umask', [0o022, 0o077])
def test_the_permissions_of_any_new_file(umask, tmp_path):
    before = os.umask(umask)
    try:
        write_files({tmp_path / 'a.txt': 'new'})
    finally:
        os.umask(before)
    assert (tmp_path / 'a.txt').stat().st_mode & 0o777 == 0o666 & ~umask


def test_all_or_none(tmp_path):
    old = tmp_path / 'config.py'
    old.write_text('old')
    for other, error in ((fail, ValueError), (lambda file: os.close(-1), OSError)):
        with pytest.raises(error):
            write_files({old: 'new', tmp_path / 'weights.pth': other})
        assert old.read_text() == 'old' and os.listdir(tmp_path) == ['config.py']
    (tmp_path / 'report.json').mkdir()
    with pytest.raises(IsADirectoryError, match=r'report\.json is a folder'):
        write_files({old: 'new', tmp_path / 'report.json': 'new'})
    assert old.read_text() == 'old'


@pytest.mark.parametrize('what', ['fsync', 'replace'])
def test_a_system_that_refuses(what, tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_text('old')

    def refuse(*_):
        raise PermissionError('not here')

    monkeypatch.setattr(os, what, refuse)
    with pytest.raises(PermissionError):
        write_files({tmp_path / 'a.txt': 'new', tmp_path / 'b.txt': 'new'})
    assert os.listdir(tmp_path) == ['a.txt'] and (tmp_path / 'a.txt').read_text() == 'old'


def test_all_are_on_the_disk_before_one_has_its_name(tmp_path, monkeypatch):
    events, sync, rename = [], os.fsync, os.replace

    def note_sync(descriptor):
        path = os.readlink(f'/proc/self/fd/{descriptor}')
        events.append('folder' if os.path.isdir(path) else os.path.basename(path)[0])
        sync(descriptor)

    def note_rename(source, target):
        events.append(os.path.basename(target).upper())
        rename(source, target)

    monkeypatch.setattr(os, 'fsync', note_sync)
    monkeypatch.setattr(os, 'replace', note_rename)
    write_files({tmp_path / 'a': '1', tmp_path / 'b': '2'})
    assert events == ['a', 'b', 'A', 'folder', 'B', 'folder']


def test_what_is_complete_stays_once_the_first_has_its_name(tmp_path, monkeypatch):
    """A checkpoint is of no use without what belongs to it."""
    rename, paths = os.replace, [str(tmp_path / name) for name in 'ab']

    def rename_first(source, target):
        if target != paths[0]:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, 'replace', rename_first)
    with pytest.raises(KeyboardInterrupt), replacing() as stage:
        for path in paths:
            with open(stage(path), 'w') as file:
                file.write('new')
    assert sorted(os.listdir(tmp_path)) == ['a', 'b.partial']
