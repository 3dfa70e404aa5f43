# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How a command ends."""

import pytest

from fgc_mm.cli.run import run
from fgc_mm.errors import RunError, UsageError


def test_an_error_in_the_middle_has_a_traceback_and_a_sentence(capfd):
    def main():
        raise ZeroDivisionError('division by zero')

    with pytest.raises(SystemExit) as stop:
        run(main)
    err = capfd.readouterr().err
    assert stop.value.code == 1
    assert 'Traceback' in err
    assert (
        err.strip().splitlines()[-1].startswith('error: the run was stopped by ZeroDivisionError')
    )
    with pytest.raises(SystemExit) as stop:
        run(main, 'the test failed')
    err = capfd.readouterr().err
    assert stop.value.code == 2 and 'Traceback' not in err
    assert err.startswith('error: the test failed: ZeroDivisionError: division by zero')


def test_every_rank_tells_what_stopped_it(monkeypatch, capfd):
    def fail(error):
        def main():
            raise error

        with pytest.raises(SystemExit):
            run(main)
        return capfd.readouterr().err

    monkeypatch.setenv('RANK', '1')
    assert fail(UsageError('known to all')) == ''
    assert fail(RunError('only here')) == 'error: only here\n'
