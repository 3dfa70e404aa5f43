# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Errors as sentences: what is said, when, and when not."""

import pytest
from torch.utils.data import DataLoader

from fgc_mm.errors import DataError, RunError, UsageError
from fgc_mm.runtime.messages import did_you_mean, explained, sentence


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


def test_an_error_of_python_says_where_it_was():
    with pytest.raises(RunError) as caught, explained('it failed'):
        raised_in_a_line_of_its_own({})
    assert '(in raised_in_a_line_of_its_own, test_messages.py:' in str(caught.value)


def raised_in_a_line_of_its_own(mapping):
    return mapping['x']


def test_files_and_long_messages():
    error = raised(open, '/nowhere/at/all')
    assert sentence(error) == 'No such file or directory: /nowhere/at/all'
    long = RuntimeError('\n'.join(f'line {n} ' + 'x' * 1000 for n in range(100)))
    assert len(sentence(long)) < 5000 and sentence(long).endswith('...')


def test_what_is_alike_is_proposed():
    assert did_you_mean('dept', ['depth', 'widths']) == "; did you mean 'depth'?"
    assert did_you_mean('x', ['depth']) == ''
