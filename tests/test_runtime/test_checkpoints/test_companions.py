# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Files beside a checkpoint: written, found, removed and refused with it."""

import os
from pathlib import Path

import malicious
import pytest
import torch
from mmengine.hooks import Hook

from fgc_mm.runtime import SafeCheckpointHook
from fgc_mm.runtime.checkpoints.companions import find_companion, is_companion, read_companion


class Keeper(Hook):
    """A hook of anybody's that keeps something beside each checkpoint."""

    def __init__(self):
        self.paths, self.token = [], None

    def before_run(self, runner):
        SafeCheckpointHook.of(runner)

    def before_save_checkpoint(self, runner, checkpoint):
        token = self.token or f'of {runner.iter}'
        saver = SafeCheckpointHook.of(runner)
        self.paths.append(saver.add_companion('notes', token, dict(rows=torch.ones(3))))


@pytest.fixture
def keeper():
    return Keeper()


def test_it_is_kept_with_its_checkpoint(keeper, digits_cfg, build):
    runner = build(digits_cfg([], **{'default_hooks.checkpoint': dict(max_keep_ckpts=1)}))
    runner.register_hook(keeper)
    runner.train()
    folder = Path(runner.work_dir)
    names = sorted(path.name for path in folder.glob('*.pth'))
    assert names == ['epoch_2.notes.pth', 'epoch_2.pth']
    assert [os.path.basename(path) for path in keeper.paths] == [
        'epoch_1.notes.pth', 'epoch_2.notes.pth',
    ]  # fmt: skip
    content = read_companion(keeper.paths[-1])
    assert content['token'].startswith('of ') and content['rows'].sum() == 3
    assert [is_companion(str(folder / name)) for name in names] == [True, False]
    # Nobody looks after a checkpoint that is saved behind the hook's back.
    assert SafeCheckpointHook.of(runner).add_companion('notes', 'x', {}) is None


def test_what_is_there_already_is_not_written_again(keeper, digits_cfg, build):
    keeper.token = 'same'
    runner = build(digits_cfg([], max_epochs=1))
    runner.register_hook(keeper)
    times = []

    class Again(Hook):
        priority = 'VERY_LOW'

        def after_train_epoch(self, runner):
            for token in ('same', 'same', 'other'):
                keeper.token = token
                runner.save_checkpoint(runner.work_dir, 'mine.pth')
                times.append(os.stat(keeper.paths[-1]).st_ino)

    runner.register_hook(Again())
    runner.train()
    assert times[0] == times[1] != times[2]


def test_found_beside_or_where_this_run_writes(tmp_path):
    work, others = tmp_path / 'work', tmp_path / 'others'
    for folder in (work, others):
        folder.mkdir()
        (folder / 'epoch_1.notes.pth').write_text('')
    inside, outside = (str(f / 'epoch_1.notes.pth') for f in (work, others))

    def find(recorded, checkpoint, folders):
        return find_companion('notes', recorded, 'token', checkpoint, folders)

    assert find(inside, None, [str(work)]) == inside
    assert find(outside, None, [str(work)]) is None
    assert find(outside, str(work / 'epoch_1.pth'), []) == inside  # by its name, beside
    assert find(f'{work}/../others/epoch_1.notes.pth', None, [str(work)]) is None


def test_one_that_is_broken_or_runs_code_is_refused(tmp_path):
    path = str(tmp_path / 'epoch_1.notes.pth')
    torch.save(dict(token='old'), path)
    assert read_companion(path)['token'] == 'old'
    Path(path).write_bytes(Path(path).read_bytes()[:100])
    with pytest.raises(ValueError, match=r'notes\.pth, of a checkpoint, cannot be read'):
        read_companion(path)
    # One that would run code is refused by whoever reads it, in the tools or elsewhere.
    torch.save(malicious.by_pickle(dict(token='old'), tmp_path / 'marker'), path)
    with pytest.raises(ValueError, match=r'notes\.pth, of a checkpoint, cannot be read'):
        read_companion(path)
    assert not (tmp_path / 'marker').exists()
    torch.save(torch.ones(2), path)
    with pytest.raises(ValueError, match='it has no token'):
        read_companion(path)
