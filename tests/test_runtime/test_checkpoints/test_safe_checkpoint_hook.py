# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The order in which checkpoints are written and removed, and what a kill in between leaves."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from mmengine.fileio import LocalBackend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from fgc_mm.errors import CheckpointError
from fgc_mm.runtime import RandomStateHook, SafeCheckpointHook

FGC = dict(type='FGCHook', layers=[-1], k=5, eta=0.1)
SAFE = dict(type='SafeCheckpointHook')
BY_ITERATION = {
    'train_cfg': dict(_delete_=True, by_epoch=False, max_iters=5),
    'log_processor': dict(by_epoch=False),
    'train_dataloader.sampler': dict(type='InfiniteSampler', shuffle=True),
}


@pytest.fixture
def validated(digits_cfg):
    loader = digits_cfg(work_dir='unused').train_dataloader
    return dict(val_dataloader=loader, val_cfg=dict(), val_evaluator=dict(type='Accuracy'))


def train(build, cfg):
    runner = build(cfg)
    runner.train()
    return runner


def files(folder):
    found = sorted(p.name for p in Path(folder).iterdir() if p.is_file())
    return [name for name in found if not name.endswith('.py')]  # configs, named by time


class Watch:
    """What happens to files, in order, as the interpreter reports it."""

    def __init__(self):
        self.events, self.on = [], False
        sys.addaudithook(self.note)  # for good: `on` says whether it listens

    def note(self, event, args):
        if not self.on or event not in ('open', 'os.rename', 'os.remove'):
            return
        if event == 'open' and not (isinstance(args[1], str) and 'w' in args[1]):
            return
        names = [os.path.basename(str(arg)) for arg in args[: 1 + (event == 'os.rename')]]
        if 'checkpoint' in names[0] or '.pth' in names[0]:
            self.events.append((event.replace('os.', ''), *names))


def test_the_order(digits_cfg, build, monkeypatch):
    watch, sync = Watch(), os.fsync

    def note_sync(descriptor):
        if watch.on:
            path = os.readlink(f'/proc/self/fd/{descriptor}')
            folder = os.path.isdir(path)
            watch.events.append(('sync', 'folder' if folder else os.path.basename(path)))
        sync(descriptor)

    monkeypatch.setattr(os, 'fsync', note_sync)
    runner = build(
        digits_cfg([FGC], max_epochs=2, **{'default_hooks.checkpoint': dict(max_keep_ckpts=1)})
    )
    runner.train_loop  # noqa: B018  built, with files of its own
    watch.on = True
    runner.train()
    watch.on = False
    second = watch.events[watch.events.index(('open', 'epoch_2.banks.pth.partial')) :]
    assert second == [
        ('open', 'epoch_2.banks.pth.partial'),
        ('open', 'epoch_2.pth.partial'),
        ('sync', 'epoch_2.pth.partial'),
        ('sync', 'epoch_2.banks.pth.partial'),
        ('rename', 'epoch_2.pth.partial', 'epoch_2.pth'),
        ('sync', 'folder'),
        ('rename', 'epoch_2.banks.pth.partial', 'epoch_2.banks.pth'),
        ('sync', 'folder'),
        ('open', 'last_checkpoint'),
        ('rename', 'last_checkpoint', 'last_checkpoint.partial'),
        ('sync', 'last_checkpoint.partial'),
        ('rename', 'last_checkpoint.partial', 'last_checkpoint'),
        ('sync', 'folder'),
        ('remove', 'epoch_1.banks.pth'),
        ('remove', 'epoch_1.pth'),
    ]
    assert 'save_checkpoint' not in vars(runner)
    hook = next(h for h in runner.hooks if isinstance(h, CheckpointHook))
    assert isinstance(hook.file_backend, LocalBackend)
    assert '_save_checkpoint_with_step' not in vars(hook)


@pytest.mark.parametrize(
    ('checkpoint', 'more'),
    [
        (dict(max_keep_ckpts=1, save_best='accuracy/top1'), {}),
        (dict(max_keep_ckpts=2, filename_tmpl='e{}.pth', out_dir='out'), {}),
        (dict(max_keep_ckpts=1, filename_tmpl='newest.pth'), {}),
        (dict(max_keep_ckpts=1, by_epoch=False, interval=2, save_last=True), BY_ITERATION),
        (dict(interval=2, save_last=False, file_client_args=dict(backend='disk')), {}),
    ],
)
def test_the_same_files_and_weights_as_without_it(
    checkpoint, more, digits_cfg, validated, build, tmp_path
):
    """Any CheckpointHook; EMA swaps weights while it saves."""
    if 'out_dir' in checkpoint:
        checkpoint = {**checkpoint, 'out_dir': str(tmp_path / 'out')}
    changes = {**validated, **more, 'default_hooks.checkpoint': checkpoint}
    runs = []
    for name, hooks in (('plain', [dict(type='RandomStateHook')]), ('safe', [SAFE])):
        hooks = [*hooks, dict(type='EMAHook', momentum=0.1)]
        cfg = digits_cfg(hooks, work_dir=name, max_epochs=3, **changes)
        runs.append(train(build, cfg))
    plain, safe = (Path(run.work_dir) for run in runs)
    assert files(plain) == files(safe)
    written = [Path((folder / 'last_checkpoint').read_text()) for folder in (plain, safe)]
    assert written[0].name == written[1].name
    if 'out_dir' in checkpoint:
        assert written[1].parent == tmp_path / 'out' / 'safe'
        assert files(written[0].parent) == files(written[1].parent)
    states = [torch.load(path, weights_only=False) for path in written]
    for key in ('state_dict', 'ema_state_dict'):
        for name, value in states[0][key].items():
            assert torch.equal(value, states[1][key][name])
    assert sum(isinstance(hook, RandomStateHook) for hook in runs[1].hooks) == 1


def test_hooks_of_ones_own_are_covered(digits_cfg, build):
    class Own(CheckpointHook):
        pass

    HOOKS.register_module(module=Own, name='OwnCheckpointHook', force=True)
    cfg = digits_cfg([SAFE], **{'default_hooks.checkpoint': dict(type='OwnCheckpointHook')})
    cfg.default_hooks.checkpoint.max_keep_ckpts = 1
    runner = build(cfg)
    seen = []

    class Look(CheckpointHook):
        priority = 'VERY_LOW'

        def before_save_checkpoint(self, runner, checkpoint):
            seen.append(files(runner.work_dir))

    runner.register_hook(Look(interval=-1, save_last=False))
    runner.train()
    assert 'epoch_1.pth' in seen[1]  # while the second is written
    assert 'epoch_1.pth' not in files(runner.work_dir)


def test_a_kill_between_two_names(digits_cfg, build, tmp_path):
    """The checkpoint has its name, its banks have not, nothing is removed yet."""
    keep = {'default_hooks.checkpoint': dict(max_keep_ckpts=1)}
    full = train(build, digits_cfg([FGC], work_dir='full', max_epochs=3, **keep))
    first = train(build, digits_cfg([FGC], work_dir='run', max_epochs=1, **keep))
    folder = Path(first.work_dir)
    old = {name: (folder / name).read_bytes() for name in ('epoch_1.pth', 'epoch_1.banks.pth')}
    train(build, digits_cfg([FGC], work_dir='run', max_epochs=2, resume=True, **keep))
    for name, content in old.items():
        (folder / name).write_bytes(content)
    (folder / 'epoch_2.banks.pth').rename(folder / 'epoch_2.banks.pth.partial')
    shutil.copy(folder / 'epoch_1.banks.pth', folder / 'epoch_2.banks.pth')  # of an earlier run
    (folder / 'epoch_3.pth.partial').write_bytes(b'half')
    (folder / 'last_checkpoint.partial').mkdir()

    # It goes on without a step: what is left over is gone, and the banks are there.
    train(build, digits_cfg([FGC], work_dir='run', max_epochs=2, resume=True, **keep))
    assert [f for f in files(folder) if '.pth' in f] == ['epoch_2.banks.pth', 'epoch_2.pth']
    assert not (folder / 'last_checkpoint.partial').exists()
    resumed = train(build, digits_cfg([FGC], work_dir='run', max_epochs=3, resume=True, **keep))
    assert files(folder) == files(full.work_dir)
    for name, value in full.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])


def test_no_room_for_the_banks(digits_cfg, build, room_for_files_of):
    """They are written first; nothing of the checkpoint is there then."""
    hook = {**FGC, 'layers': 'all'}
    folder = Path(train(build, digits_cfg([hook], max_epochs=1)).work_dir)
    before = files(folder)
    runner = build(digits_cfg([hook], max_epochs=2, resume=True))
    runner.logger.handlers.clear()  # its file is under the same limit
    message = (
        r'epoch_2.pth could not be saved: File too large. The last .*epoch_1.pth, is untouched'
    )
    room = (folder / 'epoch_1.banks.pth').stat().st_size // 2
    with room_for_files_of(room), pytest.raises(CheckpointError, match=message):
        runner.train()
    assert files(folder) == before


@pytest.mark.parametrize('code', [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize('file', ['epoch_2.banks.pth.partial', 'epoch_2.pth.partial'])
def test_a_disk_that_is_found_full_when_it_is_synced(file, code, digits_cfg, build, monkeypatch):
    """As on a network's disk, which takes everything and says so later."""
    keep = {'default_hooks.checkpoint': dict(max_keep_ckpts=1)}
    folder = Path(train(build, digits_cfg([FGC], max_epochs=1, **keep)).work_dir)
    before = {path.name: path.read_bytes() for path in folder.glob('*.pth*')}
    sync = os.fsync

    def fail(descriptor):
        if os.readlink(f'/proc/self/fd/{descriptor}').endswith(file):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    runner = build(digits_cfg([FGC], max_epochs=2, resume=True, **keep))
    monkeypatch.setattr(os, 'fsync', fail)
    advice = 'See to it' if code == errno.EIO else 'Make room'
    message = rf'epoch_2.pth could not be saved: {os.strerror(code)}. .* is untouched. {advice}'
    with pytest.raises(CheckpointError, match=message):
        runner.train()
    assert {path.name: path.read_bytes() for path in folder.glob('*.pth*')} == before
    assert (folder / 'last_checkpoint').read_text().endswith('epoch_1.pth')


def test_what_a_checkpoint_names_stays_inside_its_folder(digits_cfg, build, tmp_path):
    runner = train(build, digits_cfg([SAFE], max_epochs=1))
    path = Path(runner.work_dir) / 'epoch_1.pth'
    checkpoint = torch.load(path, weights_only=False)
    outside = tmp_path / 'mine.pth'
    outside.write_text('precious')
    checkpoint['safe_checkpoint']['outdated'] = [str(outside), '../mine.pth']
    torch.save(checkpoint, path)
    train(build, digits_cfg([SAFE], max_epochs=2, resume=True))
    assert outside.read_text() == 'precious'


def test_the_validation_of_the_resumed_checkpoint(digits_cfg, validated, build):
    """It is made up for, once, and only if the checkpoint is from before it."""

    def metrics(runner):
        logs = sorted(Path(runner.work_dir).rglob('scalars.json'))
        lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        return [line['accuracy/top1'] for line in lines if 'accuracy/top1' in line]

    visual = dict(visualizer=dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackend')]))
    changes = {**validated, **visual}
    first = train(build, digits_cfg([SAFE], max_epochs=1, **changes))
    assert len(metrics(first)) == 1
    again = train(build, digits_cfg([SAFE], max_epochs=1, resume=True, **changes))
    one, other = metrics(again)
    assert one == other
    # The best one is the first, so the checkpoint was saved again with its name in it.
    changes['default_hooks.checkpoint'] = dict(save_best='accuracy/top1')
    train(build, digits_cfg([SAFE], work_dir='best', max_epochs=1, **changes))
    third = train(build, digits_cfg([SAFE], work_dir='best', max_epochs=2, resume=True, **changes))
    assert len(metrics(third)) == 2


def test_the_history_of_batch_shaping_goes_on(digits_cfg, build):
    hooks = [SAFE, dict(type='BatchShapingHook', zeta=0.5, history=4)]
    full = train(build, digits_cfg(hooks, work_dir='full'))
    train(build, digits_cfg(hooks, max_epochs=1))
    resumed = train(build, digits_cfg(hooks, resume=True))
    for name, value in full.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])


def test_epochs_of_another_length(digits_cfg, build):
    """As after a change of the number of ranks: all that is counted in epochs goes on."""
    schedules = [
        dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=4),
        dict(type='CosineAnnealingLR', T_max=4, by_epoch=True, convert_to_iter_based=True),
        dict(type='MultiStepLR', milestones=[1, 3], by_epoch=True),
    ]
    rates = []

    class Note(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.epoch >= 2:
                rates[-1].append(runner.optim_wrapper.get_lr()['lr'][0])

    def run(name, batch_size, epochs, **changes):
        changes = {**changes, 'train_dataloader.batch_size': batch_size}
        cfg = digits_cfg([SAFE], name, max_epochs=4, param_scheduler=schedules, **changes)
        cfg.train_cfg.max_epochs = epochs
        runner = build(cfg)
        runner.register_hook(Note())
        rates.append([])
        runner.train()
        return runner

    run('one', 16, 2)  # of 3 iterations
    resumed = run('one', 8, 4, resume=True)  # of 5
    assert resumed.iter == 20 == resumed.max_iters
    run('two', 8, 4)
    assert len(rates[1]) == 10 and rates[1] == rates[2]
    assert SafeCheckpointHook.of(resumed) is SafeCheckpointHook.of(resumed)
