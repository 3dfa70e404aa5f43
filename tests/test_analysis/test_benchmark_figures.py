# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Figures of the benchmarks, from measurements made up."""

import json
import runpy
from pathlib import Path

import pytest
from gate_tables import assert_inside, assert_labeled
from runs import Run

from fgc_mm.analysis import style

BENCHMARKS = Path(__file__).parents[2] / 'benchmarks'


def test_speed_shows_what_is_slower_than_dense(tmp_path):
    module = runpy.run_path(str(BENCHMARKS / 'speed_plot.py'))
    rows = [
        dict(network=network, kind=kind, batch=batch, macs_ratio=0.5, time_ratio=ratio)
        for network in ('ResNet-18', 'ResNet-50')
        for batch in (1, 8)
        for kind, ratio in dict(static=0.5, packed=0.8, masked=1.32, sparse=0.6).items()
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


def test_budgets_in_the_one_style(tmp_path):
    module = runpy.run_path(str(BENCHMARKS / 'budget.py'))
    results = []
    for number, (series, setting) in enumerate(
        [('budget', 0.3), ('budget', 0.7), ('fixed rho', 1.0), ('fixed rho', 3.0)]
    ):
        folder = tmp_path / str(number)
        log = folder / 'x' / 'vis_data' / 'scalars.json'
        log.parent.mkdir(parents=True)
        steps = [{'step': s, 'budget/goal': 0.5, 'budget/share': 0.6} for s in (10, 20)]
        log.write_text('\n'.join(map(json.dumps, steps)))
        run = Run(tmp_path / 'base.py', folder, tmp_path / 'own.py', tmp_path, series=series)
        results.append(module['Result'](run, setting, 0.3 + 0.1 * number, 90.0 + number))
    figure = module['draw']({'classification': ('accuracy/top1', results)})
    assert_labeled(figure, 2)
    shares, metric = figure.axes
    trainings = [line.get_color() for line in shares.lines[::3]]
    assert trainings == [*style.RUNS[:2]]  # a color for each target
    assert [line.get_color() for line in metric.lines] == [*style.RUNS[:2]]
    assert [text.get_text() for text in metric.get_legend().get_texts()] == ['budget', 'fixed rho']


def test_coupling_in_the_one_style(tmp_path):
    module = runpy.run_path(str(BENCHMARKS / 'fgc_plot.py'))
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
