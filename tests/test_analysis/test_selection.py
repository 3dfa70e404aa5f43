# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a command line chooses of a table."""

import pytest
from gate_tables import make_table

from fgc_mm.analysis.selection import find_picture
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
