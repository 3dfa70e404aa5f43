# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Checkpoints that name files elsewhere: nothing there is deleted, read or written."""

import os

import pytest
import torch

from fgc_mm.runtime.checkpoints.work_dir_paths import WorkDirHook, is_inside

FGC = dict(type='FGCHook', layers=[-1], k=5)


@pytest.fixture
def tampered(digits_cfg, build, tmp_path):
    """A run of one epoch whose checkpoint lists files of others; the config to go on, the files."""
    loader = digits_cfg().train_dataloader
    changes = dict(
        val_dataloader={**loader, 'sampler': dict(type='DefaultSampler', shuffle=False)},
        val_cfg=dict(),
        val_evaluator=dict(type='Accuracy', topk=1),
    )
    hook = {'default_hooks.checkpoint': dict(save_best='auto', max_keep_ckpts=1)}
    build(digits_cfg([FGC], max_epochs=1, **changes, **hook)).train()
    others = tmp_path / 'others'
    others.mkdir()
    files = [others / 'thesis.tex', others / 'theirs.banks.pth', tmp_path / 'run' / 'notes.txt']
    for file in files:
        file.write_text('precious')
    path = tmp_path / 'run' / 'epoch_1.pth'
    content = torch.load(path, weights_only=False)
    content['message_hub']['runtime_info'].update(
        best_ckpt=str(files[0]), best_score=-1.0, keep_ckpt_ids=['/../../others/thesis.tex', 1]
    )
    content['safe_checkpoint']['outdated'] = [str(file) for file in files]
    torch.save(content, path)
    return digits_cfg([FGC], max_epochs=2, resume=True, **changes, **hook), files


def test_a_resumed_training_deletes_nothing_elsewhere(tampered, build):
    cfg, files = tampered
    runner = build(cfg)
    runner.register_hook(WorkDirHook())
    runner.train()
    assert runner.epoch == 2
    assert [file.read_text() for file in files] == ['precious'] * 3
    assert os.path.isfile(os.path.join(runner.work_dir, 'epoch_2.pth'))


def test_without_the_hook_it_would(tampered, build):
    """mmengine's own hook does what the checkpoint says; the banks are ours."""
    cfg, files = tampered
    build(cfg).train()
    assert [file.exists() for file in files] == [False, True, True]


def test_inside(tmp_path):
    (tmp_path / 'work').mkdir()
    (tmp_path / 'work-2').mkdir()
    (tmp_path / 'work' / 'link').symlink_to(tmp_path / 'work-2')
    work = str(tmp_path / 'work')
    assert is_inside(f'{work}/a.pth', [work]) and is_inside(f'{work}/b/a.pth', [None, work])
    for path in (
        f'{work}-2/a.pth', f'{work}/../a.pth', f'{work}/link/a.pth', work, '', None, '/etc/passwd',
        's3://bucket/run/a.pth',
    ):  # fmt: skip
        assert not is_inside(path, [work]), path
    assert is_inside('/etc/passwd', ['/'])
    assert is_inside('s3://bucket/run/a.pth', ['s3://bucket/run'])
    assert not is_inside('s3://bucket/run/../a.pth', ['s3://bucket/run'])
    assert not is_inside('s3://bucket/run-2/a.pth', ['s3://bucket/run'])
