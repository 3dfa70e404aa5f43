# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What the bytes of a file tell before anything in it is unpickled."""

import io
import zipfile

import malicious
import pytest
import torch

from fgc_mm.runtime.checkpoints.file import (
    checkpoint_fault,
    file_fault,
    is_of_a_training,
    unusual_format,
)

TRAINING = dict(state_dict=dict(x=torch.arange(3000.0)), message_hub={}, optimizer={})


@pytest.fixture
def path(tmp_path):
    torch.save(TRAINING, tmp_path / 'epoch_1.pth')
    return tmp_path / 'epoch_1.pth'


def test_a_whole_one(path):
    assert checkpoint_fault(str(path)) is None and file_fault(str(path), whole=True) is None
    assert is_of_a_training(str(path))
    torch.save(dict(TRAINING, optimizer=None), path, _use_new_zipfile_serialization=False)
    assert file_fault(str(path)) is None  # as PyTorch wrote it before 1.6
    torch.save(TRAINING['state_dict'], path)
    assert is_of_a_training(str(path)) is False


@pytest.mark.parametrize(
    ('content', 'reason', 'advice'),
    [
        (b'', 'it is empty (0 bytes)', 'take an earlier one'),
        (b'hello', 'its 5 bytes are not what torch.save writes', 'name the .pth file'),
        (b'PK\x03\x04 cut off', 'it is cut short or damaged (its 12 bytes', 'take an earlier one'),
    ],
)
def test_what_is_none(content, reason, advice, path):
    path.write_bytes(content)
    message = checkpoint_fault(str(path))
    assert message.startswith(f'{path} cannot be read as a checkpoint: {reason}')
    assert f'; {advice}' in message
    assert is_of_a_training(str(path)) is None
    assert 'it is a folder' in checkpoint_fault(str(path.parent))


def test_another_archive(path):
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('a.txt', 'hello')
    reason = 'it is a zip archive of something else (it holds a.txt)'
    assert file_fault(str(path)) == file_fault(str(path), whole=True) == reason


def test_a_flipped_bit_shows_when_all_is_read(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert file_fault(str(path)) is None
    assert 'has another checksum' in file_fault(str(path), whole=True)


def test_formats_that_torch_loads_in_ways_of_their_own(path, tmp_path):
    malicious.write_tar(tmp_path / 'tar.pth', tmp_path / 'marker')
    script = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), script)
    script.seek(0)
    assert unusual_format(script) == 'a TorchScript program' and script.tell() == 0
    for name, what in (('tar.pth', 'a tar archive of an early PyTorch'), (path.name, None)):
        with open(tmp_path / name, 'rb') as file:
            assert unusual_format(file) == what and file.tell() == 0
