# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import runpy
from pathlib import Path

import pytest
from gate_tables import assert_inside

SCRIPT = Path(__file__).parents[2] / 'benchmarks' / 'speed_plot.py'


def test_speed_shows_what_is_slower_than_dense(tmp_path):
    module = runpy.run_path(str(SCRIPT))
    rows = [
        dict(network=network, kind=kind, batch=batch, macs_ratio=0.5, time_ratio=ratio)
        for network in ('ResNet-18', 'ResNet-50')
        for batch in (1, 8)
        for kind, ratio in dict(static=0.5, sparse=1.32).items()
    ]
    figure = module['figure'](rows)
    assert_inside(figure)
    assert figure.axes[0].get_ylabel()
    for axes in figure.axes:
        assert axes.get_xlabel()
        bottom, top = axes.get_ylim()
        points = [y for dots in axes.collections for _, y in dots.get_offsets()]
        assert min(points) == pytest.approx(-0.32)
        assert bottom < min(points) and max(points) < top
    module['draw'](rows, tmp_path / 'speed.png')
    assert {path.name for path in tmp_path.iterdir()} == {'speed.png', 'speed.svg'}
