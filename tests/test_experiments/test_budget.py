# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The figure of experiments/budget.py, from measurements made up."""

import json

import budget
from gate_tables import assert_labeled
from runs import Run

from fgc_mm.analysis import style


def test_budgets_in_the_one_style(tmp_path):
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
        results.append(budget.Result(run, setting, 0.3 + 0.1 * number, 90.0 + number))
    figure = budget.draw({'classification': ('accuracy/top1', results)})
    assert_labeled(figure, 2)
    shares, metric = figure.axes
    trainings = [line.get_color() for line in shares.lines[::3]]
    assert trainings == [*style.RUNS[:2]]  # a color for each target
    assert [line.get_color() for line in metric.lines] == [*style.RUNS[:2]]
    assert [text.get_text() for text in metric.get_legend().get_texts()] == ['budget', 'fixed rho']
