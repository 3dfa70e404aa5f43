# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Tables for the log."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

_COLUMNS = {
    'gate': 'gate',
    'channels': 'channels',
    'openness_mean': 'open, mean',
    'openness_min': 'min',
    'openness_max': 'max',
    'always_on': 'always on',
    'never_on': 'never on',
}


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of :func:`~fgc_mm.evaluation.layer_rows` as plain text."""
    table = Table(box=SIMPLE, pad_edge=False)
    for key, title in _COLUMNS.items():
        table.add_column(title, justify='left' if key == 'gate' else 'right', no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in _COLUMNS))
    out = io.StringIO()
    Console(file=out, width=120, color_system=None, force_terminal=False).print(table)
    return '\n'.join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())


def _cell(value: Any) -> str:
    return f'{100 * value:.1f} %' if isinstance(value, float) else str(value)
