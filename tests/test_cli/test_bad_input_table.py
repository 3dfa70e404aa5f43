# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Every mistake of bad_input.txt ends in one sentence, exit code 2, and an unharmed work dir."""

import hashlib
import re
import signal
from pathlib import Path

import pytest
import torch
from bad_input import CONFIGS, PROJECT, Place, filled, make_small_data, read_table
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.utils import import_modules_from_strings

SECONDS = 60  # for one case; they take one or two


class LateError(BaseException):
    """Not an Exception, which the tools would make a message of."""


@pytest.fixture(scope='module')
def small_data(demo_root, tmp_path_factory):
    """Few pictures of every kind and checkpoints of the demo classifiers."""
    root = tmp_path_factory.mktemp('small')
    make_small_data(demo_root, root)
    import_modules_from_strings('mmpretrain.models')
    for name in ('dense', 'gated'):
        model_cfg = Config.fromfile(PROJECT / CONFIGS[name]).model
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            model = MODELS.build(model_cfg)
        torch.save(dict(meta=dict(epoch=1), state_dict=model.state_dict()), root / f'{name}.pth')
    return root


@pytest.fixture
def work_dir(tmp_path):
    """A work dir that an earlier run has filled."""
    work = tmp_path / 'work'
    (work / '20260101_000000' / 'vis_data').mkdir(parents=True)
    for name in [*(Path(path).name for path in CONFIGS.values()), 'mine.py']:
        (work / name).write_text('# the config of an earlier run\nmodel = dict()\n')
    (work / 'epoch_1.pth').write_bytes(b'weights of an earlier run')
    (work / 'last_checkpoint').write_text('nowhere else')
    (work / '20260101_000000' / 'vis_data' / 'scalars.json').write_text('{"step": 1}\n')
    return work


def digests(*folders):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in sorted(folder.rglob('*'))
        if path.is_file()
    }


@pytest.fixture
def check(run_tool, small_data, work_dir, tmp_path):
    """Runs the tool of a case and looks at all it must and must not do."""

    def late(*_):
        raise LateError(f'the tool was still running after {SECONDS} s')

    def run(case):
        place = Place(tmp_path / 'place', small_data)
        place.path.mkdir()
        case.prepare(place)
        kept = [place.path, small_data] + ([] if case.name.endswith('(began)') else [work_dir])
        before = digests(*kept)
        tool, args = case.arguments(place, work_dir)
        former = signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        try:
            code, out, err = run_tool(tool, *args)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, former)
        assert code == 2, (code, out[-1000:], err[-2000:])
        assert 'Traceback' not in out + err, err[-3000:]
        message = re.split('^(?:fgc .*: |.*py: )?error: ', err, flags=re.MULTILINE)[-1].strip()
        for words in case.words:
            assert filled(words, place, work_dir) in message, message
        assert len(message.splitlines()) <= 15, message
        after = digests(*kept)
        changed = [str(path) for path, digest in before.items() if after.get(path) != digest]
        assert not changed, changed

    return run


def marks(case):
    return () if case.fast else pytest.mark.slow


CASES = read_table()


def test_the_table_is_one():
    names = [(case.section, case.name) for case in CASES]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    assert all(all(case.words) for case in CASES)
    assert sum(case.fast for case in CASES) >= 60


@pytest.mark.parametrize(
    'case',
    [pytest.param(case, id=f'{case.section}: {case.name}', marks=marks(case)) for case in CASES],
)
def test_a_mistake_is_one_sentence(case, check):
    check(case)
