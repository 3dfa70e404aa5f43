# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How far it is and how long it takes, in a log and on a terminal."""

import os
import pty
import re
import select
import subprocess
import sys

import pytest

from fgc_mm.analysis import progress as module


def test_a_log_has_a_line_now_and_then(monkeypatch, capsys):
    clock = iter([0.0, 4.0, 20.0, 30.0, 60.0])
    monkeypatch.setattr(module.time, 'monotonic', lambda: next(clock))
    with module.progress('pictures', 100) as advance:
        for done in (10, 30, 20, 40):
            advance(done)
    # After 4 s and 30 s nothing: less than 15 s since the line before.
    assert capsys.readouterr().err.splitlines() == [
        'pictures: 40 of 100, about 30 s left',
        'pictures: 100 of 100, about 0 s left',
    ]


SCRIPT = """
import time
from fgc_mm.analysis.progress import progress
with progress('gates of x.pth', 20) as advance:
    for _ in range(20):
        time.sleep(0.06)
        advance()
"""


def test_a_terminal_has_a_bar_with_an_estimate():
    ours, theirs = pty.openpty()
    environment = dict(os.environ, TERM='xterm', COLUMNS='100')
    process = subprocess.Popen(
        [sys.executable, '-c', SCRIPT], stderr=theirs, stdout=subprocess.DEVNULL, env=environment
    )
    os.close(theirs)
    text = ''
    try:
        while select.select([ours], [], [], 60)[0]:
            text += os.read(ours, 4096).decode()
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(timeout=60) == 0
    plain = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', text)
    assert 'gates of x.pth' in plain and '20/20' in plain and '\u2501' in plain
    between = re.findall(r'(\d+)/20 (-?:?\d*:?\d+:\d+)', plain)
    assert any(0 < int(done) < 20 for done, _ in between), plain[-500:]


@pytest.mark.parametrize('total', [0, 3])
def test_nothing_to_say_about_what_is_short(total, capsys):
    with module.progress('pictures', total) as advance:
        for _ in range(total):
            advance()
    assert capsys.readouterr().err == ''
