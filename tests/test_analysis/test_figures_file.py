# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import json
from pathlib import Path

import pytest

from fgc_mm.analysis.figures_file import read_figures
from fgc_mm.analysis.selection import run_names

TEST = {'accuracy/top1': 98.0, 'macs/pruning_ratio': 40.0}


def test_figures_of_one_test_and_of_a_dial(tmp_path):
    path = tmp_path / 'x.json'
    path.write_text(json.dumps(dict(metrics=TEST)))
    assert read_figures(path) == [TEST]
    path.write_text(json.dumps(dict(points=[dict(metrics=TEST), dict(metrics=TEST)])))
    assert read_figures(path) == [TEST, TEST]


@pytest.mark.parametrize('text', ['{}', '[1]', 'nothing', '{"metrics": {"mIoU": 1}}'])
def test_a_file_that_holds_no_figures(text, tmp_path):
    path = tmp_path / 'x.json'
    path.write_text(text)
    with pytest.raises(ValueError, match=r'holds no figures of tools/test.py'):
        read_figures(path)


@pytest.mark.parametrize(
    'paths, names',
    [
        (['w/gated/x', 'w/fgc/x'], ['gated', 'fgc']),
        (['w/run/epoch_1.pth', 'w/run/epoch_2.pth'], ['epoch_1', 'epoch_2']),
        (['w/gated/seed1/x', 'w/fgc/seed1/x'], ['gated/seed1', 'fgc/seed1']),
        (['w/a/run/seed1/x', 'w/b/run/seed1/x'], ['a/run/seed1', 'b/run/seed1']),
        (['a/seed1/x', 'b/seed1/x'], ['a/seed1', 'b/seed1']),
        (['w/a/seed1/x', 'w/b/seed1/y'], ['a/seed1', 'b/seed1']),
        (['w/a/x', 'w/a/x'], ['1: x', '2: x']),
    ],
)
def test_runs_are_called_by_what_tells_them_apart(paths, names):
    assert run_names(None, [Path(path) for path in paths]) == names
