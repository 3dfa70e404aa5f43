# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How far it is and how long it takes, on a terminal."""

import io
import re
import time

from rich.console import Console

from fgc_mm.analysis import progress as module


def test_a_terminal_has_a_bar_with_an_estimate(monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(module, 'Console', lambda stderr: terminal)
    with module.progress('gates of x.pth', 20) as advance:
        for _ in range(20):
            time.sleep(0.06)
            advance()
    plain = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', screen.getvalue())
    assert 'gates of x.pth' in plain and '20/20' in plain and '\u2501' in plain
    between = re.findall(r'(\d+)/20 (-?:?\d*:?\d+:\d+)', plain)
    assert any(0 < int(done) < 20 for done, _ in between), plain[-500:]


def test_a_log_has_none(capsys):
    with module.progress('pictures', 3) as advance:
        for _ in range(3):
            advance()
    assert capsys.readouterr().err == ''
