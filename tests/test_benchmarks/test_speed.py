# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""benchmarks/speed.py on tiny pictures: what it prints, writes and draws."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / 'benchmarks'
KINDS = ['dense', 'static', 'sparse']


def run(*args):
    cmd = [sys.executable, str(BENCHMARKS / 'speed.py'), *map(str, args)]
    done = subprocess.run(cmd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def setting(**times):
    """Rows of one setting that takes so much of the dense network's time."""
    common = dict(network='ResNet-18', size='64x64', batch=1, open_share=0.5, seconds=1.0)
    saves = ('static', 'sparse')
    return [
        dict(
            common,
            kind=kind,
            time_ratio=ratio,
            macs_ratio=0.5 if kind in saves else 1.0,
            realized=2 * (1 - ratio) if kind in saves else float('nan'),
        )
        for kind, ratio in dict(dense=1.0, **times).items()
    ]


def test_measures_all_kinds(tmp_path):
    out = tmp_path / 'speed.json'
    options = '--depths 18 --sizes 32x64 --batches 1 --open 0.5 --repeats 1 --warmup 0 --threads 1'
    text = run(*options.split(), '--device', 'cpu', '--out', out, '--plot', tmp_path / 'a.png')
    rows = json.loads(out.read_text())['rows']
    assert [row['kind'] for row in rows] == KINDS
    figures = {row['kind']: row for row in rows}
    for kind, row in figures.items():
        assert f'  {kind:<14}' in text and row['seconds'] > 0
    assert figures['dense']['macs_ratio'] == 1
    assert figures['static']['macs_ratio'] < figures['sparse']['macs_ratio'] < 0.6  # gates cost
    assert (tmp_path / 'a.png').stat().st_size > 5000


@pytest.fixture
def speed(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import speed

    return speed


def test_slimming_needs_a_trained_network(speed, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['speed.py', '--kinds', 'slim'])
    with pytest.raises(SystemExit):
        speed.parse_args()
    assert '--kinds slim: give --trained CONFIG CHECKPOINT' in capsys.readouterr().err


@pytest.mark.skipif(not Path('/proc/stat').is_file(), reason='only Linux counts others')
def test_others_are_noticed(speed):
    others = speed.Others()
    with subprocess.Popen([sys.executable, '-c', 'while True: pass']) as process:
        try:
            time.sleep(0.3)  # it has to start
            others.restart()
            time.sleep(1.0)
            found = others.share()
        finally:
            process.kill()
    assert found > speed.DISTURBED


class Still:
    """Networks that take no time."""

    turns = 0
    calls = property(lambda self: dict.fromkeys(KINDS, lambda: None))

    def next_repetition(self):
        self.turns += 1


def test_some_kinds_only(speed, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['speed.py', '--kinds', 'sparse'])
    monkeypatch.setattr(speed.Others, 'share', lambda self: 0.0)
    assert list(speed.measure(Still(), speed.parse_args())) == ['dense', 'sparse']


def test_disturbed_repetitions_are_made_again(speed, monkeypatch, capsys):
    options = ['--repeats', '3', '--warmup', '2', '--again', '5']
    monkeypatch.setattr(sys, 'argv', ['speed.py', *options])
    args = speed.parse_args()
    shares = iter([0.5, 0.0, 0.2, 0.0, 0.0])
    monkeypatch.setattr(speed.Others, 'share', lambda self: next(shares))
    networks = Still()
    times = speed.measure(networks, args)
    assert {len(seconds) for seconds in times.values()} == {3} and networks.turns == 2 + 5
    assert '2 disturbed repetitions' in capsys.readouterr().out
    # On a machine that is never quiet it comes to an end all the same.
    monkeypatch.setattr(speed.Others, 'share', lambda self: 1.0)
    networks = Still()
    speed.measure(networks, args)
    assert networks.turns == 2 + 5 + 3


@pytest.fixture
def plots(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import speed_plot

    return speed_plot


def test_table_of_a_run(plots):
    head, _, line = plots.table(setting(static=0.5, sparse=0.6)).splitlines()
    cells = dict(zip(head.strip('| ').split(' | '), line.strip('| ').split(' | '), strict=True))
    assert cells['static: time'] == '0.50' and cells['sparse: time'] == '0.60'
    assert cells['sparse / static'] == '80 %'


def test_all_points_are_inside_the_plot(plots):
    rows = setting(static=0.5, sparse=1.32)
    (axis,) = plots.figure(rows).axes
    bottom, top = axis.get_ylim()
    assert bottom < 1 - 1.32 and top == 1
