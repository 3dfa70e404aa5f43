# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import runpy
from pathlib import Path

import pytest
from gate_tables import assert_labeled

from fgc_mm.analysis import style

SCRIPT = Path(__file__).parents[2] / 'benchmarks' / 'fgc_plot.py'


def test_coupling_in_the_one_style(tmp_path):
    module = runpy.run_path(str(SCRIPT))
    results = [
        dict(size=10**n, times=dict(ours=[0.1 * n], plain=[0.5 * n]), ours=0.3, plain=60.0 * n)
        for n in (4, 5)
    ]
    results.append(dict(size=1_281_167, times=dict(ours=[1.7, 1.8, 1.6]), ours=50.0))
    figure = module['figure'](results, 'D=64, B=256, k=200, 2 CPU threads')
    assert_labeled(figure, 2)
    time, memory = figure.axes
    for axes in (time, memory):
        ours, plain = axes.lines
        assert (ours.get_color(), plain.get_color()) == style.RUNS[:2]
        assert [*ours.get_xdata()] == [10_000, 100_000, 1_281_167]
        assert [*plain.get_xdata()] == [10_000, 100_000]  # the plain way has its limit
    assert [*time.lines[0].get_ydata()] == pytest.approx([400, 500, 1700])
    assert [*memory.lines[0].get_ydata()] == [1, 1, 50]  # less than a MB has a place, too
    module['draw'](results, tmp_path / 'cost.png', 'x')
    assert {path.name for path in tmp_path.iterdir()} == {'cost.png', 'cost.svg'}
