# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Errors as sentences: what is said, when, and when not. The tools' own are in test_tools."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Optional, Union

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from torch.utils.data import DataLoader

from fgc_mm.errors import DataError, RunError, UsageError
from fgc_mm.runtime import launch
from fgc_mm.runtime.argument_types import describe, fits
from fgc_mm.runtime.first_step import KeptConfig, guard
from fgc_mm.runtime.mistakes import explained, sentence


def raised(function, *args, **kwargs):
    with pytest.raises(Exception) as caught:
        function(*args, **kwargs)
    return caught.value


def test_clear_errors_pass_and_others_are_explained(monkeypatch):
    for clear in (UsageError('mine'), DataError('picture x')):
        with pytest.raises(type(clear)) as caught, explained('it failed'):
            raise clear
        assert caught.value is clear
    with pytest.raises(RunError, match="KeyError: the key 'x'"), explained('it failed'):
        {}['x']
    monkeypatch.setenv('FGC_MM_TRACEBACK', '1')
    with pytest.raises(KeyError), explained('it failed'):
        {}['x']


def test_what_a_data_worker_raises_has_no_inner_traceback():
    class Items:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise ValueError('the third picture is blue')

    error = raised(lambda: list(DataLoader(Items(), num_workers=1)))
    assert 'Traceback' in str(error)
    assert sentence(error).startswith('ValueError: the third picture is blue')


def test_a_class_says_which_argument_it_does_not_have_or_needs():
    with pytest.raises(Exception) as caught:
        MODELS.build(dict(type='GatedResNet', depth=18, frozen_stage=1))
    expected = "GatedResNet has no argument 'frozen_stage'; did you mean 'frozen_stages'"
    assert sentence(caught.value).startswith(expected)
    with pytest.raises(Exception) as caught:
        MODELS.build(dict(type='GatedResNet'))
    assert sentence(caught.value) == "GatedResNet needs the argument 'depth'"


def test_files_and_long_messages():
    error = raised(open, '/nowhere/at/all')
    assert sentence(error) == 'No such file or directory: /nowhere/at/all'
    long = RuntimeError('\n'.join(f'line {n} ' + 'x' * 1000 for n in range(100)))
    assert len(sentence(long)) < 5000 and sentence(long).endswith('...')


@pytest.mark.parametrize(
    ('value', 'hint', 'fitting', 'words'),
    [
        (1, int, True, 'a whole number'),
        (True, int, False, 'a whole number'),
        (1, float, True, 'a number'),
        ('1', float, False, 'a number'),
        (None, Optional[float], True, 'a number or None'),
        ([1, 'a'], Union[str, int, Sequence[Union[str, int]]], True, None),
        ([1.5], Sequence[int], False, 'a list (a whole number each)'),
        ('ab', Sequence[str], False, 'a list (a text each)'),
        ({}, Mapping[str, int], True, 'a dict'),
        (3, dict, False, 'a dict'),
        ('b', Literal['a', 'b'], True, "'a' or 'b'"),
        ('c', Literal['a', 'b'], False, "'a' or 'b'"),
        (object(), Any, True, None),
        ('float16', Union[str, torch.dtype], True, 'a text or dtype'),
    ],
)
def test_types(value, hint, fitting, words):
    assert fits(value, hint) is fitting
    assert words is None or describe(hint) == words


class Failing:
    """Fails in a step of the training."""

    def __init__(self, task, step):
        class Task(task):
            calls = 0

            def forward(self, *args, **kwargs):
                Task.calls += 1
                if Task.calls == step:
                    raise RuntimeError('cannot multiply')
                return super().forward(*args, **kwargs)

        self.model = Task()


@pytest.mark.parametrize(('step', 'kind'), [(1, RunError), (3, RuntimeError)])
def test_only_the_first_step_is_explained(step, kind, make_runner, toy, tmp_path):
    earlier = tmp_path / 'mine.py'
    earlier.write_text('of an earlier run')
    cfg = Config(dict(work_dir=str(tmp_path)))
    object.__setattr__(cfg, '_filename', '/elsewhere/mine.py')
    kept = KeptConfig(cfg)
    runner = make_runner(model=Failing(toy.task, step).model)
    object.__setattr__(runner.cfg, '_filename', '/elsewhere/mine.py')
    runner.dump_config()  # as it does when it is built from a file
    assert earlier.read_text() != 'of an earlier run'
    guard(runner, kept)
    assert earlier.read_text() == 'of an earlier run'
    with pytest.raises(kind, match='cannot multiply') as caught:
        runner.train()
    explained_now = str(caught.value).startswith('the first training step failed: ')
    assert explained_now is (step == 1)
    # A run that began owns the work dir; one that did not leaves it as it was.
    assert (earlier.read_text() == 'of an earlier run') is (step == 1)


def test_an_error_in_the_middle_has_a_traceback_and_a_sentence(capfd):
    def main():
        raise ZeroDivisionError('division by zero')

    with pytest.raises(SystemExit) as stop:
        launch.run(main)
    err = capfd.readouterr().err
    assert stop.value.code == 1
    assert 'Traceback' in err
    assert (
        err.strip().splitlines()[-1].startswith('error: the run was stopped by ZeroDivisionError')
    )
    with pytest.raises(SystemExit) as stop:
        launch.run(main, 'the test failed')
    err = capfd.readouterr().err
    assert stop.value.code == 2 and 'Traceback' not in err
    assert err.startswith('error: the test failed: ZeroDivisionError: division by zero')


def test_every_rank_tells_what_stopped_it(monkeypatch, capfd):
    def fail(error):
        def main():
            raise error

        with pytest.raises(SystemExit):
            launch.run(main)
        return capfd.readouterr().err

    monkeypatch.setenv('RANK', '1')
    assert fail(UsageError('known to all')) == ''
    assert fail(RunError('only here')) == 'error: only here\n'
