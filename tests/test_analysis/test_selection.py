# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a command line chooses of a table."""

from pathlib import Path

import pytest
from gate_tables import make_table

from fgc_mm.analysis.selection import find_picture, run_names
from fgc_mm.errors import UsageError


def test_a_query_by_number_and_by_file():
    table = make_table(6)
    assert find_picture(table, '4') == 4
    with pytest.raises(UsageError, match=r'--query a.jpg: name a picture by its number, 0 to 5'):
        find_picture(table, 'a.jpg')
    table.paths = [f'data/{name}/a.jpg' for name in 'xyzuvw']
    assert find_picture(table, 'z/a.jpg') == 2 and find_picture(table, 'data/w/a.jpg') == 5
    with pytest.raises(UsageError, match=r'or by its file \(6 have this one\)'):
        find_picture(table, 'a.jpg')


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
